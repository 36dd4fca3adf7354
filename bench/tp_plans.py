"""Counts the architectures that can be sharded over two ranks among those with a tensor-parallel plan in transformers.

    python bench/tp_plans.py                 # all, some minutes
    python bench/tp_plans.py phi3 olmo2

Each is built without memory at its configuration's default sizes. Prints a line with the reason for each architecture
that is refused, and the counts.
"""

import importlib
import inspect
import sys
import warnings

import torch
from redline.models.families import schedule_of
from redline.schedule import create_schedule
from transformers import AutoModel, AutoModelForCausalLM
from transformers.models.auto.configuration_auto import CONFIG_MAPPING


def main() -> None:
    """Tries every architecture, or the named ones."""
    warnings.filterwarnings("ignore")
    cut, refused, unmade = [], [], []
    for name in sys.argv[1:] or sorted(CONFIG_MAPPING.keys()):
        config = configuration(name)
        if config is None:
            continue
        try:
            model = made(config)
        except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
            unmade.append(name)
            print(f"{name}: its default sizes make no model ({type(error).__name__})")
            continue
        reason = schedule_of(name).support(create_schedule(model)).tp(2)
        (refused if reason else cut).append(name)
        if reason:
            print(f"{name}: {reason}")
    print(f"{len(cut)} are cut, {len(refused)} refused, {len(unmade)} not made")


def configuration(name: str) -> type | None:
    """The configuration class of an architecture that has a plan; None for others."""
    kind: type = CONFIG_MAPPING[name]
    return kind if getattr(kind, "base_model_tp_plan", None) else None


def made(kind: type) -> torch.nn.Module:
    """Builds a model on the meta device. A configuration without an automatic class is resolved by its module."""
    config = kind()
    with torch.device("meta"):
        for automatic in (AutoModelForCausalLM, AutoModel):
            if type(config) in automatic._model_mapping:
                return automatic.from_config(config)
        module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
        for name, each in vars(module).items():
            if inspect.isclass(each) and getattr(each, "config_class", None) is kind and name.endswith("Model"):
                if not name.endswith("PreTrainedModel"):
                    return each(config)
    raise ValueError(f"no model of {kind.__name__} is known")


if __name__ == "__main__":
    main()
