"""Batches depend only on seed and position, whichever process reads them and in whatever grouping."""

import pickle
import random
import subprocess
import sys
from pathlib import Path

import pytest
import redline
import torch
from texts import TOPICS

WAYS = [
    ("causal", "packed"),
    ("causal", "padded"),
    ("masked", "packed"),
    ("masked", "padded"),
    ("seq2seq", "packed"),
]


@pytest.fixture
def topics(write):
    return write("topics.jsonl", [{"text": each[:400]} for each in TOPICS[:30]])


def equal(one, two):
    return one.keys() == two.keys() and all(torch.equal(one[key], two[key]) for key in one)


def sliced(batch, start, stop):
    return {key: value[start:stop] for key, value in batch.items()}


@pytest.mark.parametrize(("task", "packing"), WAYS)
def test_a_batch_does_not_depend_on_how_positions_are_grouped(samples, topics, task, packing):
    made = samples(topics, task=task, packing=packing, seq_len=24)
    whole = made(5, 60)  # over several epochs if there are few samples
    assert whole["input_ids"].shape == whole["labels"].shape == (60, 24)
    for key, value in whole.items():
        assert value.dtype == torch.int64, key
    draw = random.Random(0)
    at = 0
    while at < 60:
        count = min(draw.randint(1, 9), 60 - at)
        assert equal(made(5 + at, count), sliced(whole, at, at + count))
        at += count


def test_an_epoch_trains_on_every_sample_once_and_never_on_what_is_held_out(samples, topics):
    made = samples(topics, packing="packed", held_out=0.1, seq_len=64)  # long enough that no two are equal
    first = made.ids(0, len(made)).tolist()
    assert len(set(first)) == len(first) == len(made)
    second = made.ids(len(made), len(made)).tolist()
    assert sorted(first) == sorted(second) and first != second
    rows = {tuple(row) for row in made(0, len(made))["input_ids"].tolist()}
    held = made.evaluation(0, made.num_evaluation)["input_ids"].tolist()
    assert not rows & set(map(tuple, held))
    assert made.num_evaluation == pytest.approx(0.1 * (len(made) + made.num_evaluation), abs=1)
    with pytest.raises(IndexError, match=rf"samples 0 to {made.num_evaluation} were requested, but"):
        made.evaluation(0, made.num_evaluation + 1)


def test_another_seed_is_another_order_of_the_same_samples_and_evaluation_is_the_same(samples, topics):
    for task in ("causal", "masked"):
        one, two = (samples(topics, packing="packed", task=task, held_out=0.2, seed=seed) for seed in (0, 1))
        assert one.ids(0, 20).tolist() != two.ids(0, 20).tolist()
        assert sorted(one.ids(0, len(one)).tolist()) == sorted(two.ids(0, len(two)).tolist())
        assert equal(one.evaluation(0, 5), two.evaluation(0, 5))
        assert one.describe()["digest"] != two.describe()["digest"]
        assert one.describe()["tokens_digest"] == two.describe()["tokens_digest"]


def test_padded_samples_are_documents_and_padding_is_not_predicted(samples, write):
    path = write("a.jsonl", [{"text": "abc"}, {"text": "0123456789"}, {"text": ""}, {"text": "z"}])
    made = samples(path, seq_len=6, shuffle=False, packing="padded", pad_id=2)
    batch = made(0, 3)
    text = [[100, 101, 102, 1, 2, 2], [51, 52, 53, 54, 55, 56], [125, 1, 2, 2, 2, 2]]
    assert batch["input_ids"].tolist() == text
    assert batch["labels"].tolist() == [[each if each != 2 else -100 for each in row] for row in text]
    assert set(batch) == {"input_ids", "labels"}
    assert len(made) == 3 and made.describe()["shortened_documents"] == 1
    masked = samples(path, seq_len=6, shuffle=False, packing="padded", pad_id=2, task="masked")(0, 3)
    assert masked["attention_mask"].tolist() == [[1, 1, 1, 1, 0, 0], [1] * 6, [1, 1, 0, 0, 0, 0]]


def test_masks_hide_15_percent_of_each_sample_s_own_tokens_anew_each_epoch(samples, topics, bpe):
    made = samples(topics, packing="padded", task="masked", seq_len=200, tokenizer=bpe[0])
    plain = samples(topics, packing="padded", seq_len=200, tokenizer=bpe[0])
    batch, tokens = made(0, len(made)), plain(0, len(made))["input_ids"]
    chosen, real = batch["labels"] != -100, batch["attention_mask"].bool()
    assert chosen.sum(dim=1).tolist() == [max(1, round(0.15 * each)) for each in real.sum(dim=1).tolist()]
    assert (~real).any() and not (chosen & ~real).any()
    assert torch.equal(batch["labels"][chosen], tokens[chosen])
    assert torch.equal(batch["input_ids"][~chosen], tokens[~chosen])
    hidden = (batch["input_ids"][chosen] == bpe[1].mask_token_id).float().mean()
    assert 0.7 < hidden < 0.9
    where = made.ids(0, len(made)).tolist().index(int(made.ids(len(made), 1)[0]))
    assert not torch.equal(made(len(made), 1)["labels"], batch["labels"][where : where + 1])


def test_sequence_to_sequence_predicts_what_follows(samples, topics):
    made = samples(topics, task="seq2seq", seq_len=10, shuffle=False)
    row = samples(topics, seq_len=20, shuffle=False)(3, 1)["input_ids"]
    batch = made(3, 1)
    assert torch.equal(torch.cat([batch["input_ids"], batch["labels"]], dim=1), row)


def test_another_process_has_the_same_batches(samples, topics, tmp_path):
    made = samples(topics, task="masked", packing="packed")
    code = (
        "import pickle, sys, hashlib; made = pickle.load(open(sys.argv[1], 'rb')); batch = made(11, 13)\n"
        "print(hashlib.sha256(b''.join(batch[key].numpy().tobytes() for key in sorted(batch))).hexdigest())"
    )
    (tmp_path / "made").write_bytes(pickle.dumps(made))
    environment = {"PYTHONPATH": str(Path(redline.__file__).parents[1]), "PYTHONHASHSEED": "7"}
    command = [sys.executable, "-c", code, str(tmp_path / "made")]
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    import hashlib

    batch = made(11, 13)
    assert output.strip() == hashlib.sha256(b"".join(batch[key].numpy().tobytes() for key in sorted(batch))).hexdigest()
