"""Load for a server: starts it, has clients ask it one after the other, prints how many answers came and how late, and ends it.

python load.py --port 8000 --clients 16 --seconds 3 -- python serve.py --port 8000
"""

import argparse
import http.client
import json
import random
import signal
import subprocess
import sys
import threading
import time


class Client(threading.Thread):
    """Sends a request as soon as the one before is answered."""

    def __init__(self, port: int, seed: int, until: float) -> None:
        super().__init__(daemon=True)
        self.port, self.random, self.until = port, random.Random(seed), until
        self.answers: list[tuple[float, float]] = []
        """When each came, s of the monotonic clock, and how long it took, s."""
        self.error: Exception | None = None

    def run(self) -> None:
        try:
            connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
            while time.monotonic() < self.until:
                prompt = [self.random.randrange(1024) for _ in range(self.random.randint(4, 16))]
                begin = time.monotonic()
                connection.request("POST", "/generate", json.dumps({"tokens": prompt}))
                response = connection.getresponse()
                body = response.read()
                if response.status != 200:
                    raise RuntimeError(f"the server answered {response.status}: {body.decode()[:200]}")
                self.answers.append((time.monotonic(), time.monotonic() - begin))
        except Exception as error:  # told by the main thread
            self.error = error


def wait_until_it_answers(server: "subprocess.Popen[bytes]", port: int, timeout_s: float) -> None:
    end = time.monotonic() + timeout_s
    while True:
        if server.poll() is not None:
            raise SystemExit(f"error: the server ended with code {server.returncode} before it answered")
        try:
            connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
            connection.request("GET", "/")
            connection.getresponse().read()
            return
        except OSError:
            if time.monotonic() > end:
                raise SystemExit(f"error: the server did not answer within {timeout_s:g} s") from None
            time.sleep(0.05)


def measure(port: int, clients: int, warmup_s: float, seconds: float) -> str:
    begin = time.monotonic() + warmup_s
    asking = [Client(port, seed, begin + seconds) for seed in range(clients)]
    for each in asking:
        each.start()
    for each in asking:
        each.join()
    for each in asking:
        if each.error is not None:
            raise SystemExit(f"error: a request failed: {type(each.error).__name__}: {each.error}")
    took = sorted(took for each in asking for at, took in each.answers if begin <= at < begin + seconds)
    if not took:
        raise SystemExit(f"error: no request was answered within {seconds:g} s")
    p50, p99 = (1e3 * took[min(len(took) - 1, int(share * len(took)))] for share in (0.50, 0.99))
    return f"{len(took) / seconds:.1f} requests/s, p50 {p50:.1f} ms, p99 {p99:.1f} ms"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--clients", type=int, default=8, help="that ask at once")
    parser.add_argument("--warmup", type=float, default=0.5, help="s")
    parser.add_argument("--seconds", type=float, default=3.0, help="that count")
    parser.add_argument("server", nargs="+", help="its command, after --")
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    server = subprocess.Popen(options.server, stdin=subprocess.DEVNULL)
    try:
        wait_until_it_answers(server, options.port, 60.0)
        print(measure(options.port, options.clients, options.warmup, options.seconds), flush=True)
    finally:
        server.terminate()
        try:
            server.wait(5)
        except subprocess.TimeoutExpired:
            server.kill()
            server.wait()


if __name__ == "__main__":
    main()
