"""Metrics that a training script reports to redline, in three lines:

from redline import report
...
report(step=step, tokens=tokens_of_this_step, loss=float(loss))
"""

import json
import os
import time

FILE = "REDLINE_REPORT"
"""Environment variable with the path of the report file, set for a tuned command."""
TIME = "time_s"
"""Key of the report's time, s of the host's monotonic clock."""


def report(**metrics: float) -> None:
    """Reports the metrics of a step to the search that tunes this command.

    Does nothing outside a search, and on all ranks except rank 0. Call it when the step's work is done: on a GPU after
    `torch.cuda.synchronize()`, or every few steps with the sum.

    Args:
        metrics: numbers by name: `step`, `tokens` and `samples` of all ranks since the last report, `loss`, or any
            other that `--metric` names, such as `tokens_per_second`.
    """
    path = os.environ.get(FILE)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    line = json.dumps({**{name: float(value) for name, value in metrics.items()}, TIME: time.monotonic()})
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
