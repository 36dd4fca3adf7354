"""Counts the bytes of live tensors while code runs, from the operators that run."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Live(TorchDispatchMode):
    """Counts the bytes of live tensors that operators created. A view counts as part of its storage."""

    def __init__(self):
        super().__init__()
        self.now, self.peak, self.largest, self.seen = 0, 0, 0, set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        given = {
            each.untyped_storage()._cdata for each in tree_leaves((args, kwargs)) if isinstance(each, torch.Tensor)
        }
        for each in tree_leaves(out):
            if isinstance(each, torch.Tensor) and each.untyped_storage()._cdata not in given:
                self.add(each.untyped_storage())
        return out

    def add(self, storage):
        key, size = storage._cdata, storage.nbytes()
        if key in self.seen:
            return
        self.seen.add(key)
        self.now += size
        self.peak, self.largest = max(self.peak, self.now), max(self.largest, size)
        weakref.finalize(storage, self.drop, key, size)

    def drop(self, key, size):
        self.seen.discard(key)
        self.now -= size
