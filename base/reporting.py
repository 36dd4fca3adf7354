"""What a training script tells redline of itself, in three lines:

from redline import report
...
report(step=step, tokens=tokens_of_this_step, loss=float(loss))
"""

import json
import os
import time

FILE = "REDLINE_REPORT"
"""In its environment a command that is tuned finds the file to write to."""
TIME = "time_s"
"""The moment of a report, s of the host's monotonic clock."""


def report(**metrics: float) -> None:
    """Tells the search that tunes this command what a step brought; does nothing in a run that nobody tunes, and on
    all ranks but the first.

    Call it when the step's work is done: on a GPU after `torch.cuda.synchronize()`, or every few steps with the sum.

    Args:
        metrics: numbers by name. `step`, `tokens` and `samples` of all ranks since the last report, `loss`, or any
            other that `--metric` names, such as `tokens_per_second`.
    """
    path = os.environ.get(FILE)
    if path is None or os.environ.get("RANK", "0") != "0":
        return
    line = json.dumps({**{name: float(value) for name, value in metrics.items()}, TIME: time.monotonic()})
    with open(path, "a", encoding="utf-8") as file:
        file.write(line + "\n")
