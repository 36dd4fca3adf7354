from .base.errors import (
    MissingDependency as MissingDependency,
    NothingFound as NothingFound,
    OutOfMemory as OutOfMemory,
    RedlineError as RedlineError,
    RunnerError as RunnerError,
    ScheduleError as ScheduleError,
    SpaceError as SpaceError,
    StudyError as StudyError,
    TraceError as TraceError,
    UsageError as UsageError,
    WorkloadError as WorkloadError,
)
from .base.reporting import report as report
from .estimator import (
    Estimate as Estimate,
    Estimator as Estimator,
    Hardware as Hardware,
    ModelFacts as ModelFacts,
    TrainingSetup as TrainingSetup,
)
from .models import Workload as Workload, workload as workload
from .results import Measurement as Measurement, Status as Status, Trial as Trial
from .runners.command.command import Command as Command
from .schedule import (
    Schedule as Schedule,
    build as build,
    collectives as collectives,
    create_schedule as create_schedule,
    list_primitives as list_primitives,
    register_primitive as register_primitive,
    seed_ranks as seed_ranks,
    verify as verify,
)
from .service.client import Client as Client
from .space import Config as Config, Space as Space
from .trainer.accelerate.api import Accelerated as Accelerated, accelerate as accelerate
from .training.applying import apply_schedule as apply_schedule
from .tuner import Result as Result, Sampler as Sampler, tune as tune

__version__: str
from .tuner.scaling import scale as scale
