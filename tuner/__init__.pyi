from .budget import Budget as Budget
from .listener import SearchListener as SearchListener
from .result import Result as Result
from .samplers import Sampler as Sampler, make_sampler as make_sampler, sampler_names as sampler_names
from .tuning import tune as tune
