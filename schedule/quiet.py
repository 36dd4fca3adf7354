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
    rates = [(each, name, getattr(each, name)) for each in model.modules() for name in rates_of(each)]
    try:
        with modes_kept(model):
            if training:
                model.train()
            else:
                for each in model.modules():
                    each.training = isinstance(each, nn.RNNBase)
            for each, name, _ in rates:
                setattr(each, name, 0.0)
            yield
    finally:
        for each, name, value in rates:
            setattr(each, name, value)


@contextmanager
def modes_kept(model: nn.Module) -> Iterator[None]:
    """Restores the mode of every module at the end."""
    modes = [(each, each.training) for each in model.modules()]
    try:
        yield
    finally:
        for each, mode in modes:
            each.training = mode


def rates_of(module: nn.Module) -> list[str]:
    """Attributes of a module that are rates of dropout."""
    return [
        name
        for name, value in vars(module).items()
        if (name == "p" and isinstance(module, DropoutNd)) or ("drop" in name and isinstance(value, float))
    ]
