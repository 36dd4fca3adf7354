from .from_workload import FromDataset as FromDataset, FromWorkload as FromWorkload, training_data as training_data
from .order import DataPlan as DataPlan
from .preparing import prepare as prepare
from .samples import Samples as Samples
