"""Beginning of scripts that run other frameworks for the tests."""

WITHOUT_TRITON = """
import importlib.abc, importlib.machinery, importlib.util, json, sys
from unittest.mock import MagicMock

# torch's own lookups of triton come first; the framework then imports kernels that nobody runs.
import torch._inductor.compile_fx, torch.utils.flop_counter

class Absent(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            return importlib.machinery.ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return MagicMock(__name__=spec.name, __path__=[], __spec__=spec, __version__="3.9.0")

    def exec_module(self, module):
        pass

if importlib.util.find_spec("triton") is None:
    sys.meta_path.append(Absent())
"""
"""Lets torchtitan and Megatron be imported without triton."""
