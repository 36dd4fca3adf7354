"""After kill -9 at any moment the table parses, the ledger loads, and the run can be resumed."""

import multiprocessing
import os
import random
import signal
import time

import pytest
from redline.results import Ledger, View, read_table


def work(open_run, point, ok, folder, done):
    """Runs trials until killed, and sends the number of each finished one."""
    run = open_run(folder, resume=True)
    for trial in run.pending():
        run.finish(trial.number, ok(trial.number + 0.5))
        done.send(trial.number)
    while True:
        number = len(run.trials())
        run.start(point(number), sampler="tpe")
        run.finish(number, ok(number + 0.5))
        done.send(number)


@pytest.mark.parametrize("times", [6, pytest.param(40, marks=pytest.mark.slow)])
def test_no_kill_loses_a_finished_trial(times, tmp_path, open_run, point, ok, make_config):
    fork = multiprocessing.get_context("fork")
    choose = random.Random(7)
    acknowledged: set[int] = set()
    in_flight = 0
    open_run(tmp_path).close()
    for _ in range(times):
        mine, theirs = fork.Pipe(duplex=False)
        worker = fork.Process(target=work, args=(open_run, point, ok, tmp_path, theirs), daemon=True)
        worker.start()
        theirs.close()
        for _ in range(choose.randrange(1, 6)):
            acknowledged.add(mine.recv())
        time.sleep(choose.random() * 0.006)
        os.kill(worker.pid, signal.SIGKILL)
        worker.join()
        while mine.poll():
            try:
                acknowledged.add(mine.recv())
            except EOFError:
                break
        mine.close()

        frame = read_table(tmp_path / "trials.csv")
        assert acknowledged <= set(frame["trial"])
        assert list(frame["throughput"]) == [number + 0.5 for number in frame["trial"]]
        trials = Ledger.load(tmp_path / "study.log", make_config=make_config).trials()
        assert [trial.number for trial in trials] == list(range(len(trials)))
        assert [trial.config for trial in trials] == [point(i) for i in range(len(trials))]
        finished = {trial.number for trial in trials if trial.ok}
        assert acknowledged <= finished
        assert set(frame["trial"]) <= finished
        assert len(trials) - len(finished) <= 1
        in_flight += len(trials) - len(finished)
        assert View(tmp_path).problems == []
    assert in_flight > 0 or times < 20, "no kill hit a trial in flight; the test proves too little"
    with open_run(tmp_path, resume=True) as run:
        for trial in run.pending():
            run.finish(trial.number, ok(trial.number + 0.5))
        assert len(run.trials()) > times
        assert list(read_table(tmp_path / "trials.csv")["trial"]) == list(range(len(run.trials())))
    # Optuna's journal takes over the lock of a killed process, whose last rename may be left.
    leftovers = {each.name for each in tmp_path.iterdir() if not each.name.startswith("study.log.lock")}
    assert leftovers == {".lock", "study.log", "trials.csv", "run.yaml", "logs"}
