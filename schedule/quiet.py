"""Disables dropout of a model in training or in evaluation."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..base._torch import DropoutNd


@contextmanager
def quiet(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Sets the model's mode without dropout in the context, and restores everything.

    Rates of dropout are set to 0: those of dropout modules, and those that modules have as attributes
    (`attention_dropout`). Recurrent networks also train in evaluation, for which cuDNN has no backward pass; they use
    the mode for nothing else.
    """
    rates = [(module, name, getattr(module, name)) for module in model.modules() for name in rates_of(module)]
    try:
        with modes_kept(model):  # train() and the loop below change the mode of every module
            if training:
                model.train()
            else:
                for module in model.modules():
                    module.training = isinstance(module, nn.RNNBase)
            for module, name, _ in rates:
                setattr(module, name, 0.0)
            yield
    finally:
        for module, name, value in rates:
            setattr(module, name, value)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every module at the end."""
    modes = [(module, module.training) for module in model.modules()]
    try:
        yield
    finally:
        for module, mode in modes:
            module.training = mode


def rates_of(module: nn.Module) -> list[str]:
    """Returns the names of a module's attributes that are rates of dropout."""
    return [
        name
        for name, value in vars(module).items()
        if (name == "p" and isinstance(module, DropoutNd)) or ("drop" in name and isinstance(value, float))
    ]
