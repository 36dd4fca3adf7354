"""Estimates for API requests, cached in memory.

`predicted` runs in a helper process (`child_processes.py`), which imports torch and traces models; `Estimates` in the
server.
"""

import hashlib
import json
import tempfile
import threading
from collections import OrderedDict
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from .child_processes import Helper
from .request import TARGETS, arguments

SECONDS = 120.0
"""Time limit of an estimate, s."""
REMEMBERED = 2000
_OWN = ("hardware", "memory_limit", "config", "top", "layerwise")


class Estimates:
    """A cache of estimates. Thread-safe."""

    def __init__(self) -> None:
        self._helper = Helper(SECONDS)
        # By digest of the request, which may have a MiB.
        self._known: OrderedDict[bytes, dict[str, Any]] = OrderedDict()
        self._lock = threading.Lock()

    def of(self, form: Mapping[str, Any]) -> dict[str, Any]:
        """Returns the document of `redline estimate --json` for a submitted request.

        Raises:
            UsageError: a field is unknown or invalid, or the estimate takes too long.
        """
        key = hashlib.sha256(json.dumps(form, sort_keys=True).encode()).digest()
        with self._lock:
            if key in self._known:
                self._known.move_to_end(key)
                return self._known[key]
        found: dict[str, Any] = self._helper.call(predicted, dict(form))
        with self._lock:
            self._known[key] = found
            while len(self._known) > REMEMBERED:
                self._known.popitem(last=False)
        return found

    def close(self) -> None:
        """Stops the helper process."""
        self._helper.close()


def predicted(form: dict[str, Any]) -> dict[str, Any]:
    """Returns the estimate of a submitted request; see `Estimates.of`."""
    from ..estimator.document import estimate_document
    from ..estimator.hardware import named_hardware
    from ..estimator.request import estimate_request
    from ..tuner.budget import parse_memory

    own = {name: form.get(name) for name in _OWN}
    with tempfile.TemporaryDirectory(prefix="redline-") as folder:
        asked = arguments(
            {name: each for name, each in form.items() if name not in _OWN or name in TARGETS}, Path(folder)
        )
        request = estimate_request(
            hardware=named_hardware(str(own["hardware"])), memory_limit_mib=parse_memory(own["memory_limit"]), **asked
        )
        top, layerwise = own["top"] or 5, bool(own["layerwise"])
        return estimate_document(request, config=own["config"], top=top, layerwise=layerwise).to_dict()
