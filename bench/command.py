"""The overhead of a trial of a command over the command itself, and the cost of its observer.

    python bench/command.py [--trials 20] [--rounds 15]

One run alternates between a command started by `subprocess.run` and the same command as a trial on the local runner,
from the request to the measurement. The command imports nothing and prints its speed at its end, so that the
difference is the cost of the trial: its process, folder and log, the supervision of memory and output, and the end of
all its processes. Goal: a median below 0.2 s.

The observer's cost is that of the smallest training there is, run in turns with and without it: a linear layer of eight
weights on batches of four, whose step takes less than 0.3 ms. Goals: 50 µs a step, 10 ms at the start of Python.
"""

import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from common import parser
from redline.base.device import detect
from redline.results import Status
from redline.runners import LocalRunner, TrialRequest, TrialTerms
from redline.runners.command.command import Command
from redline.runners.command.observation import FOLDER, OBSERVER
from redline.runners.command.work import Commands
from redline.space import Space

TRAINING = """
import sys, time, torch
from torch.utils.data import DataLoader
torch.set_num_threads(1)
model = torch.nn.Linear(8, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
loader = DataLoader(torch.randn(8000, 8), batch_size=4)
for repetition in range(2):
    begin = time.process_time()
    for rows in loader:
        model(rows).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
print((time.process_time() - begin) / len(loader) * 1e6)
"""
PROGRAM = "import time; time.sleep(0.2); print('speed 5')"


def observer_cost(rounds: int) -> None:
    """Prints what the observer adds to a step and to the start of Python; medians of rounds in turns."""
    step_us: dict[bool, list[float]] = {False: [], True: []}
    start_ms: dict[bool, list[float]] = {False: [], True: []}
    for _ in range(rounds):
        for observed in (False, True):
            with tempfile.TemporaryDirectory() as folder:
                more = {FOLDER: folder, "PYTHONPATH": str(OBSERVER)} if observed else {}
                begin = time.perf_counter()
                subprocess.run([sys.executable, "-c", "pass"], env={**os.environ, **more}, check=True)
                start_ms[observed].append((time.perf_counter() - begin) * 1e3)
                words = [sys.executable, "-c", TRAINING]
                done = subprocess.run(words, env={**os.environ, **more}, check=True, capture_output=True, text=True)
                step_us[observed].append(float(done.stdout))
    for what, unit, values in (("a step", "µs", step_us), ("Python's start", "ms", start_ms)):
        added = statistics.median(after - before for before, after in zip(values[False], values[True], strict=True))
        print(f"observer: {what:14} {statistics.median(values[False]):6.1f} {unit} alone, {added:+.1f} {unit}")


def main() -> None:
    arguments = parser(__doc__)
    arguments.add_argument("--trials", type=int, default=20)
    arguments.add_argument("--rounds", type=int, default=15, help="of the training with and without the observer")
    options = arguments.parse_args()
    observer_cost(options.rounds)
    space = Space()
    space.choice("x", list(range(options.trials)))
    words = [sys.executable, "-c", PROGRAM]
    work = Commands(Command(command=[*words, "{x}"], metric=[r"speed (?P<speed>\d+)"]), space, devices=1)
    alone, tried = [], []
    with tempfile.TemporaryDirectory() as folder, LocalRunner(work, TrialTerms(device=detect())) as runner:
        runner.wait_ready()
        for number, config in enumerate(space):
            begin = time.perf_counter()
            subprocess.run([*words, str(number)], check=True, capture_output=True)
            middle = time.perf_counter()
            log = Path(folder, "logs", f"{number}.log")
            measured = runner.run(TrialRequest(config=config, number=number, log=log))
            alone.append(middle - begin)
            tried.append(time.perf_counter() - middle)
            assert measured.status is Status.OK, measured.reason
    overhead = [tried_s - alone_s for tried_s, alone_s in zip(tried, alone, strict=True)]
    print(f"the command alone  {1e3 * statistics.median(alone):6.0f} ms")
    print(f"as a trial         {1e3 * statistics.median(tried):6.0f} ms")
    print(
        f"beyond the command {1e3 * statistics.median(overhead):6.0f} ms (median of {len(overhead)}; goal: below 200 ms)"
    )


if __name__ == "__main__":
    main()
