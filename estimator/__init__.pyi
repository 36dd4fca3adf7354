from .constants import Constants as Constants
from .estimate import Estimate as Estimate, EstimateTable as EstimateTable
from .estimator import Estimator as Estimator
from .facts.model_facts import (
    Attention as Attention,
    FactsSource as FactsSource,
    Matmul as Matmul,
    ModelFacts as ModelFacts,
    Part as Part,
    PerToken as PerToken,
    Shape as Shape,
)
from .hardware import DEVICES as DEVICES, Hardware as Hardware, Link as Link, find_hardware as find_hardware
from .setup import TrainingSetup as TrainingSetup
