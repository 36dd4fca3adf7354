from .function import FunctionRunner as FunctionRunner
from .local import LocalRunner as LocalRunner
from .ray_runner import RayRunner as RayRunner
from .runner import Reference as Reference, Runner as Runner, TrialRequest as TrialRequest
from .timing import TimingPlan as TimingPlan
from .work import TrialTerms as TrialTerms
