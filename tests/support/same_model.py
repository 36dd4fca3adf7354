"""Bit-for-bit comparison of the tensors of two models."""

import torch


def held(model):
    """Parameters and buffers by all of their names."""
    return {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
    }


def bits(tensor):
    """The bytes of a tensor."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def assert_same(made, expected):
    """Checks that two models have the same tensors under the same names: bit for bit, and tied alike."""
    first, second = held(made), held(expected)
    assert list(first) == list(second) and list(made.state_dict()) == list(expected.state_dict())
    for name, tensor in first.items():
        other = second[name]
        for fact in ("dtype", "shape", "requires_grad", "device"):
            assert getattr(tensor, fact) == getattr(other, fact), name
        assert tensor.stride() == other.stride() and type(tensor) is type(other), name
        assert torch.equal(bits(tensor), bits(other)), name
    for share in (lambda tensor: id(tensor), lambda tensor: tensor.untyped_storage().data_ptr()):
        assert groups(first, share) == groups(second, share)


def groups(tensors, share):
    """Names of the tensors that have the same `share`, in groups."""
    found = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            found.setdefault(share(tensor), []).append(name)
    return sorted(found.values())
