"""A model in training or in evaluation without anything that its dropout draws."""

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from ..base._torch import DropoutNd


@contextmanager
def quiet(model: nn.Module, *, training: bool) -> Iterator[None]:
    """Within it the model trains or evaluates, and nothing is dropped; then all is as it was.

    Rates of dropout are 0: those of dropout modules, and those that modules keep as attributes (`attention_dropout`).
    Recurrent networks train in evaluation, too, for which cuDNN has no backward pass; they do nothing else with the mode.
    """
    modes = [(each, each.training) for each in model.modules()]
    rates = [(each, name, getattr(each, name)) for each, _ in modes for name in rates_of(each)]
    try:
        if training:
            model.train()
        else:
            for each, _ in modes:
                each.training = isinstance(each, nn.RNNBase)
        for each, name, _ in rates:
            setattr(each, name, 0.0)
        yield
    finally:
        for each, mode in modes:
            each.training = mode
        for each, name, value in rates:
            setattr(each, name, value)


def rates_of(module: nn.Module) -> list[str]:
    """The attributes of a module that are rates of dropout."""
    return [
        name
        for name, value in vars(module).items()
        if (name == "p" and isinstance(module, DropoutNd)) or ("drop" in name and isinstance(value, float))
    ]
