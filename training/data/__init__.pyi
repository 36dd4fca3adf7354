from .from_dataset import FromDataset as FromDataset
from .from_workload import FromWorkload as FromWorkload
from .of_workload import training_data as training_data
from .packing import check_packing as check_packing
from .plan import DataPlan as DataPlan
from .preparing import prepare as prepare
from .samples import Samples as Samples, TrainingData as TrainingData, num_predicted as num_predicted
