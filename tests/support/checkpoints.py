"""Tiny models with random weights in every tensor, and folders of them."""

import torch
from numerics_table import FAMILIES
from redline.base._transformers import quiet
from redline.models.architecture import Architecture
from redline.models.layouts.weights import LazyTensor, Weights
from redline.models.lora import AdaptedArchitecture, Lora


def architecture(family, *, lora=None, **more):
    """Returns the tiny architecture of a family of the table, or of another that takes Llama's configuration."""
    task, arguments = FAMILIES.get(family, FAMILIES["llama"])
    given = {"model_type": family, "arguments": {**arguments, **more}, "task": task}
    return AdaptedArchitecture(**given, lora=Lora.parse(lora)) if lora else Architecture(**given)


def filled(made, seed=0):
    """Returns the model with every parameter drawn at random, so that no two have the same values."""
    model = made({}).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for each in model.parameters():
            each.normal_(0, 0.2, generator=generator)
    return model


def saved(model, folder, **options):
    with quiet():
        model.save_pretrained(folder, **options)
    return folder


def weights_of(model):
    """Returns a model's own tensors as lazy weights."""
    return Weights({name: lazy(each) for name, each in model.state_dict().items()})


def lazy(tensor, log=None):
    """Returns a lazy tensor that appends the number of entries of each box read to `log`."""

    def read(box):
        if log is not None:
            log.append(tensor[box].numel())
        return tensor[box]

    return LazyTensor(read, tensor.shape, tensor.dtype)


def differing(weights, model):
    """Names of a model's tensors that the weights lack or have with other bits."""
    own = model.state_dict()
    return [
        name for name in own if name not in weights.tensors or not torch.equal(weights.tensors[name].read(), own[name])
    ]
