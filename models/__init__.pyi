from .families import generic_schedule as generic_schedule
from .flops import flops_of as flops_of
from .huggingface import hugging_face as hugging_face
from .presets import list_presets as list_presets
from .resolve import workload as workload
from .spaces import default_space as default_space, make_space as make_space
from .workload import Workload as Workload
