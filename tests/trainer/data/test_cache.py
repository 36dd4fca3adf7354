"""Tokens are prepared once, completely or not at all, by the process that comes first."""

import multiprocessing
import os
import signal
import time
from pathlib import Path

import pytest
from redline.base.errors import StudyError, WorkloadError
from redline.trainer.data import DataPlan, prepare, preparing
from redline.trainer.data.samples import write_tokens
from small_disk import on_small_disk
from texts import TOPICS

FORK = multiprocessing.get_context("fork")


@pytest.fixture
def corpus(write):
    return write("a.jsonl", [{"text": each} for each in TOPICS])


def made(path, folder, **more):
    plan = DataPlan(paths=(path,), **more)
    return prepare(plan, seq_len=32, task="causal", vocab_size=600, cache=folder)


def seen(folder):
    return sorted(each.name for each in folder.iterdir() if not each.name.endswith(".lock"))


def test_one_cache_serves_all_packings_and_seeds(corpus, tmp_path, monkeypatch):
    calls = []
    monkeypatch.setattr(preparing, "write_tokens", lambda *a, **k: calls.append(1) or write_tokens(*a, **k))
    for packing, seed in [("packed", 0), ("padded", 1), ("packed", 2)]:
        made(corpus, tmp_path / "cache", packing=packing, seed=seed)
    assert calls == [1] and len(seen(tmp_path / "cache")) == 1


def _rank(path, folder, tokenizer, begin, out):
    real = preparing.write_tokens

    def counted(*args, **more):
        out.put("made")
        time.sleep(0.3)
        return real(*args, **more)

    preparing.write_tokens = counted
    begin.wait()
    out.put(made(path, folder, tokenizer=tokenizer)(7, 5)["input_ids"].sum().item())


def ranks(number, num_lines, *arguments):
    """Starts `number` ranks together and returns the `num_lines` messages that they send."""
    begin, out = FORK.Event(), FORK.Queue()
    processes = [FORK.Process(target=_rank, args=(*arguments, begin, out)) for _ in range(number)]
    for each in processes:
        each.start()
    begin.set()
    found = [out.get(timeout=120) for _ in range(num_lines)]
    for each in processes:
        each.join()
    return found


def test_one_rank_prepares_the_cache_and_the_others_wait(corpus, tmp_path, bpe):
    reports = ranks(6, 7, corpus, tmp_path / "cache", bpe[0])
    assert reports.count("made") == 1
    assert len({each for each in reports if each != "made"}) == 1
    assert len(seen(tmp_path / "cache")) == 1


def _slow(path, folder, started):
    def waits(*args, **more):
        started.set()
        time.sleep(60)

    preparing.write_tokens = waits
    made(path, folder)


def test_a_killed_preparation_does_not_block_the_next(corpus, tmp_path):
    started = FORK.Event()
    first = FORK.Process(target=_slow, args=(corpus, tmp_path / "cache", started))
    first.start()
    assert started.wait(60)
    assert [each.startswith(".") for each in seen(tmp_path / "cache")] == [True]  # only temporary files
    os.kill(first.pid, signal.SIGKILL)
    first.join()
    before = time.monotonic()
    assert made(corpus, tmp_path / "cache").describe()["documents"] == len(TOPICS)
    assert time.monotonic() - before < 20
    assert [each.startswith(".") for each in seen(tmp_path / "cache")] == [
        False
    ]  # the killed process's files are removed


def test_data_that_changes_while_it_is_read_is_refused(corpus, tmp_path, monkeypatch):
    real = preparing.write_tokens

    def touched(*args, **more):
        with open(corpus, "a") as file:
            file.write("\n")
        return real(*args, **more)

    monkeypatch.setattr(preparing, "write_tokens", touched)
    with pytest.raises(WorkloadError, match=r"the data in .*a\.jsonl changed while it was read; start again"):
        made(corpus, tmp_path / "cache")
    assert seen(tmp_path / "cache") == []


def prepared(folder, path):
    with pytest.raises(StudyError) as refused:
        prepare(DataPlan(paths=(path,)), seq_len=8, task="causal", vocab_size=300, cache=Path(folder, "cache"))
    return str(refused.value), [each.name for each in Path(folder, "cache").iterdir() if each.suffix != ".lock"]


def test_a_disk_without_room_for_the_tokens_is_reported_and_nothing_is_left(write):
    text = write("long.txt", "It was a bright cold day in April.\n" * 150_000)
    message, left = on_small_disk(20 << 20, prepared, str(text))
    assert "No space left on device" in message and left == []
