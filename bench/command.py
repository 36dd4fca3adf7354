"""The overhead of a trial of a command over the command itself.

    python bench/command.py [--trials 20]

One run alternates between a command started by `subprocess.run` and the same command as a trial on the local runner,
from the request to the measurement. The command imports nothing and prints its speed at its end, so that the
difference is the cost of the trial: its process, folder and log, the supervision of memory and output, and the end of
all its processes. Goal: a median below 0.2 s.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from redline.base.device import detect
from redline.results import Status
from redline.runners import LocalRunner, TrialRequest, TrialTerms
from redline.runners.command.command import Command
from redline.runners.command.work import Commands
from redline.space import Space

PROGRAM = "import time; time.sleep(0.2); print('speed 5')"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trials", type=int, default=20)
    options = parser.parse_args()
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
