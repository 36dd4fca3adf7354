"""A process in place of that of a search, which plays what the name in its request says."""

import json
import os
import signal
import sys
import time
from pathlib import Path

task = json.loads(sys.stdin.buffer.read())
folder = Path(task["folder"])
play = task["request"]["target"]
started = len(list(folder.glob("started-*"))) + 1
(folder / "starting").write_text(json.dumps(task))
(folder / "starting").rename(folder / f"started-{started}")  # whole from the first look on


def write(kind, **data):
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps({"time": time.time(), "kind": kind, "data": data}) + "\n")


def end(state, reason="", **more):
    write("outcome", state=state, reason=reason, **more)
    sys.exit(0)


if play == "starts slowly":

    class Slow:
        def __del__(self):  # Python ignores what is raised here
            time.sleep(1)

    Slow()
signal.signal(signal.SIGTERM, lambda number, frame: end("queued", "paused"))
if play == "ignores an interrupt":
    signal.signal(signal.SIGINT, signal.SIG_IGN)
else:
    signal.signal(signal.SIGINT, lambda number, frame: end("cancelled", best={"throughput": 2.0}))
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})
write("plan", done=0)
if play == "writes nonsense":
    with open(folder / "events.jsonl", "a") as file:
        for line in ("[1]", '{"kind": "x"}', '{"time": 1, "kind": "said", "data": {"x": NaN}}', "x" * 100_000, "{}"):
            file.write(line + "\n")
    write("finished", trial=0, done="many")
    write("said", message="half a pair \ud800 and \0")
    end("failed", "with a \0 in it")
if play == "dies twice" and started <= 2:
    print("the last words", flush=True)
    os.kill(os.getpid(), signal.SIGKILL)
if play == "dies always":
    os.kill(os.getpid(), signal.SIGKILL)
if play == "loses the cluster once" and started == 1:
    end("queued", "Ray was lost", again=True)
if play == "loses its devices":
    end("failed", "--device-kind must name one of 4 x H100")
if play == "fails":
    end("failed", "the model has no layers")
if play in ("runs", "starts slowly", "ignores an interrupt"):
    write("waiting", what="predicting")
    while True:
        time.sleep(0.1)
write("finished", trial=0, done=1)
end("done", "all tried", best=None if task["request"].get("finds") == "nothing" else {"throughput": 3.0})
