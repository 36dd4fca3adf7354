from .export import chosen_trial as chosen_trial, export_targets as export_targets, form_of as form_of, render as render
from .export_input import Export as Export, Target as Target
from .reading import read as read
from .registry import find_launcher as find_launcher
from .trainer_config import TrainerConfig as TrainerConfig
