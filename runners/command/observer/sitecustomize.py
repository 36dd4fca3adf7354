"""Starts the observer in every Python process of a tuned command.

This folder is the first one on the command's PYTHONPATH, so that Python imports this file when it starts. It imports
nothing but the standard library, and nothing more happens in a program that never imports torch. The `sitecustomize`
that this one hides is run as well.
"""

import importlib.machinery
import importlib.util
import os
import sys

_HERE = os.path.dirname(os.path.abspath(__file__))
_WATCHED = {
    "torch.autograd": "observe_backward",
    "torch.optim.optimizer": "observe_optimizers",
    "torch.utils.data.dataloader": "observe_loaders",
    "torch.nn.modules.module": "observe_evaluation",
    "torch.amp.autocast_mode": "observe_autocast",
    "torch.serialization": "observe_saving",
    "torch.distributed.checkpoint.state_dict_saver": "observe_saving",
    "safetensors.torch": "observe_saving",
    "torch._dynamo.callback": "observe_compilation",
}
"""Modules of the program, and the function of `_redline_hooks` that is called when one has been imported."""


def _hooks():
    """Returns the module `_redline_hooks`, imported at its first use. Its folder is not on the program's path."""
    for name in ("_redline_record", "_redline_hooks"):
        if name not in sys.modules:
            spec = importlib.util.spec_from_file_location(name, os.path.join(_HERE, name + ".py"))
            module = importlib.util.module_from_spec(spec)
            sys.modules[name] = module
            spec.loader.exec_module(module)
    return sys.modules["_redline_hooks"]


class _Finder:
    """Finds the watched modules as Python would, and calls the observer after each has been executed."""

    @staticmethod
    def find_spec(name, path=None, target=None):
        if name not in _WATCHED:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is None or not hasattr(spec.loader, "exec_module"):
            return spec
        execute = spec.loader.exec_module

        def exec_module(module):
            del spec.loader.exec_module  # the attribute was set on this loader: its class's method applies again
            execute(module)
            try:
                getattr(_hooks(), _WATCHED[name])(module)
            except Exception as error:  # another version of torch, for example: the program runs without this hook
                _hooks().guarded("write", {"fault": type(error).__name__ + ": " + str(error)})

        spec.loader.exec_module = exec_module
        return spec


def _run_hidden():
    """Runs the `sitecustomize` that would have been imported without this folder."""
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", sys.path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry) != _HERE]
if os.environ.get("REDLINE_OBSERVE"):
    sys.meta_path.insert(0, _Finder)
_run_hidden()
