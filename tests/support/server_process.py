"""`redline serve` as a process."""

import re
import subprocess
import sys
import time


class Server:
    def __init__(self, folder, *options):
        self.log = folder / f"server-{time.monotonic_ns()}"
        command = [sys.executable, "-m", "redline.cli", "serve", "--data", str(folder / "data"), *options]
        with open(self.log, "w") as output:
            self.process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT)

    def line(self, pattern, seconds=120):
        """Waits for output that matches the pattern and returns its first group."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if found := re.search(pattern, self.log.read_text()):
                return found[1]
            assert self.process.poll() is None, self.log.read_text()
            time.sleep(0.1)
        raise AssertionError(f"{pattern} not in {self.log.read_text()}")

    def end(self, number):
        self.process.send_signal(number)
        return self.process.wait(timeout=60)
