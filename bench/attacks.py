"""The cost of requests from attackers, and of those from regular clients at the same time, on one server.

    python bench/attacks.py --seconds 20 --write docs/security.md

Each attack (`tests/support/attacks.py`) is sent in turn by two attackers without a pause, beside 1,100 connections
with an unfinished request and 50 clients that send a request each second. The table has the median and the 99th
percentile of both, and those of the same clients without attackers.
"""

import argparse
import contextlib
import platform
import re
import resource
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

sys.path.insert(0, str(Path(__file__).parents[1] / "tests" / "support"))
from attacks import ATTACKS, attacked, half_open
from redline.service.store import Store

WORKING, HALF_OPEN = 50, 1100
BEGIN, END = "<!-- attacks -->\n", "<!-- end of attacks -->"


@contextlib.contextmanager
def server(folder: Path):
    """Runs `redline serve` without a worker, and yields a token of each role."""
    command = [sys.executable, "-m", "redline.cli", "serve", "--data", str(folder), "--port", "0", "--no-worker"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        lines = iter(process.stdout.readline, "")
        address = next(found[1] for line in lines if (found := re.search(r"serve on (http://[^,]*),", line)))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        with Store.open(f"sqlite:///{folder}/redline.db", create=False) as store:
            roles = {"submitter": "submitter", "worker": "worker", "other": "submitter", "coder": "submitter"}
            made = {name: store.add_user(name, role, allow_code=name == "coder") for name, role in roles.items()}
            users = [store.add_user(f"user {number}", "submitter") for number in range(WORKING)]
            tokens = {name: store.new_token(user, "bench") for name, user in made.items()}
            yield address, tokens | {"working": [store.new_token(user, "bench") for user in users]}
    finally:
        process.terminate()
        process.wait(30)


def works(client: httpx.Client, end: float) -> list[float]:
    """Returns the response times, s."""
    took = []
    while time.monotonic() < end:
        start = time.monotonic()
        assert client.get("/v1/me").status_code == 200
        took.append(time.monotonic() - start)
        time.sleep(1.0)
    return took


def working(pool: ThreadPoolExecutor, clients: list[httpx.Client], end: float) -> list[float]:
    found = [pool.submit(works, client, end) for client in clients]
    return [each for future in found for each in future.result()]


def row(name: str, took: list[float], statuses: str = "") -> str:
    p99 = statistics.quantiles(took, n=100)[-1] if len(took) > 1 else took[0]
    return f"| {name} | {statuses} | {len(took):,} | {1000 * statistics.median(took):,.1f} / {1000 * p99:,.1f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=20.0, help="duration in seconds, with attackers and without")
    parser.add_argument("--write", type=Path, help="a page with the marks between which the table is written")
    options = parser.parse_args()
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 8192), hard))
    with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
        address, tokens = stack.enter_context(server(Path(folder)))
        pool = stack.enter_context(ThreadPoolExecutor(WORKING + 2))
        clients = [
            stack.enter_context(
                httpx.Client(
                    base_url=address, headers={"authorization": f"Bearer {token}"}, trust_env=False, timeout=60
                )
            )
            for token in tokens["working"]
        ]
        alone = working(pool, clients, time.monotonic() + options.seconds)
        with half_open(address, HALF_OPEN):
            end = time.monotonic() + options.seconds
            attacks = [pool.submit(attacked, address, tokens, end) for _ in range(2)]
            beside = working(pool, clients, end)
            seen = [found for each in attacks for found in each.result()]
    lines = [
        f"`python bench/attacks.py --seconds {options.seconds:g}` on {platform.machine()}; one host.",
        "",
        "| request | status | times | median / p99, ms |",
        "|---|---|---|---|",
        row("regular clients, without attackers", alone, "200"),
        row("regular clients, beside attackers", beside, "200"),
    ]
    for name in ATTACKS:
        attack_times = [(status, seconds) for each, status, seconds in seen if each == name]
        statuses = ", ".join(map(str, sorted({status for status, _ in attack_times})))
        lines.append(row(name, [seconds for _, seconds in attack_times], statuses))
    print("\n".join(lines))
    if options.write is not None:
        text = options.write.read_text()
        before, _, rest = text.partition(BEGIN)
        _, _, after = rest.partition(END)
        options.write.write_text(before + BEGIN + "\n".join(lines) + "\n" + END + after)


if __name__ == "__main__":
    main()
