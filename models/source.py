"""Workloads and other values in a user's Python file."""

import hashlib
import inspect
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Any

from ..base.errors import WorkloadError, nearest, unknown
from .workload import Workload, located


@dataclass(frozen=True, kw_only=True, slots=True)
class FileSource:
    """A Python file's text and a name in it. It is sent to other processes, where the file need not exist."""

    path: str
    """Absolute path."""
    name: str
    text: str
    """The file's text when it was read."""

    @classmethod
    def read(cls, path: Path, name: str) -> "FileSource":
        """Reads the file.

        Raises:
            WorkloadError: it cannot be read.
        """
        try:
            text = path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise WorkloadError(f"{path} is not a Python file: {error}") from None
        except OSError as error:
            near = nearest_file(path) if isinstance(error, FileNotFoundError) else ""
            raise WorkloadError(f"cannot read the Python file {path}: {error.strerror}{near}") from None
        return cls(path=str(path.resolve()), name=name, text=text)

    @property
    def digest(self) -> str:
        """SHA-256 of the text, hex."""
        return hashlib.sha256(self.text.encode()).hexdigest()

    def load(self) -> Workload:
        """Runs the file (once per process) and returns the workload of this name.

        Raises:
            WorkloadError: the file fails, has no such name, or the value is not a workload.
        """
        module = self._module()
        if not self.name or not hasattr(module, self.name):
            names = _candidates(module)
            if not self.name:
                listed = ", ".join(names) or "none"
                raise WorkloadError(f"{self.path} needs a name in it, {self.path}:NAME; workloads there: {listed}")
            raise WorkloadError(f"{self.path}: {unknown('workload', self.name, names)}")
        workload = getattr(module, self.name)
        if not isinstance(workload, Workload) and callable(workload):
            workload = self._call(workload)
        if not isinstance(workload, Workload):
            raise WorkloadError(
                f"{self.path}:{self.name} must be a redline.Workload or a function that returns one, "
                f"but is {type(workload).__name__} {workload!r}"
            )
        return replace(workload, source=self)

    def value(self) -> Any:
        """Runs the file (once per process) and returns the value of the name, of any type.

        Raises:
            WorkloadError: the file fails, or has no such name.
        """
        public = {name: value for name, value in vars(self._module()).items() if not name.startswith("_")}
        if not self.name:
            raise WorkloadError(f"{self.path} needs a name in it, {self.path}:NAME")
        if self.name not in public:
            raise WorkloadError(f"{self.path}: {unknown('name', self.name, public)}")
        return public[self.name]

    def _call(self, function: Any) -> Any:
        try:
            inspect.signature(function).bind()
        except TypeError:
            raise WorkloadError(
                f"{self.path}:{self.name} must be a redline.Workload or callable without arguments, but is "
                f"{self.name}{inspect.signature(function)}"
            ) from None
        try:
            return function()
        except (Exception, SystemExit) as error:
            raise WorkloadError(f"{self.path}:{self.name}() failed: {located(error)}") from error

    def _module(self) -> ModuleType:
        name = f"_redline_workload_{hashlib.sha256(self.path.encode()).hexdigest()[:8]}_{self.digest[:8]}"
        if name in sys.modules:
            return sys.modules[name]
        module = ModuleType(name)
        module.__file__ = self.path
        folder = str(Path(self.path).parent)
        if folder not in sys.path:
            sys.path.append(folder)  # for modules beside the file, also when they are imported later
        try:
            code = compile(self.text, self.path, "exec")
        except (SyntaxError, ValueError) as error:  # the latter for null bytes, before Python 3.12
            line, problem = "", str(error)
            if isinstance(error, SyntaxError):
                line, problem = f":{error.lineno}" if error.lineno else "", error.msg
            raise WorkloadError(f"{self.path}{line} is not valid Python: {problem}") from error
        sys.modules[name] = module
        try:
            exec(code, module.__dict__)
        except (Exception, SystemExit) as error:
            del sys.modules[name]
            raise WorkloadError(f"the Python file failed: {located(error)}") from error
        except BaseException:
            del sys.modules[name]
            raise
        return module


def nearest_file(path: Path) -> str:
    """Returns the Python file of the same folder whose name is nearest, as a hint for a message; empty if there is none."""
    files = [file.name for file in path.parent.glob("*.py")] if path.parent.is_dir() else []
    return nearest(path.name, files)


def _candidates(module: ModuleType) -> list[str]:
    """Names of workloads, or without any of functions in the file that may return one."""
    public = {name: value for name, value in vars(module).items() if not name.startswith("_")}
    workloads = [name for name, value in public.items() if isinstance(value, Workload)]
    defined_here = [name for name, value in public.items() if getattr(value, "__module__", None) == module.__name__]
    return sorted(workloads or (name for name in defined_here if inspect.isfunction(public[name])))
