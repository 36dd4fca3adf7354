from .place.local import LocalRunner as LocalRunner
from .place.ray_runner import RayRunner as RayRunner
from .runner import (
    Runner as Runner,
    TrialRequest as TrialRequest,
    TrialTerms as TrialTerms,
)
from .trial.function import FunctionRunner as FunctionRunner
from .trial.timing import TimingPlan as TimingPlan
