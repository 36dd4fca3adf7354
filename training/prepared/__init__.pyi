from .info import Info as Info
from .loader import Loader as Loader
from .model import PreparedModel as PreparedModel
from .optimizer import PreparedOptimizer as PreparedOptimizer
from .steps import Steps as Steps
