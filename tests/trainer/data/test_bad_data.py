"""Unusable data is refused with a message, and nothing of it is kept."""

import pytest
from redline.base.errors import UsageError, WorkloadError
from redline.trainer.data import DataPlan


def refused(samples, tmp_path, message, *paths, error=WorkloadError, **more):
    with pytest.raises(error, match=message):
        samples(*paths, **more)
    cache = tmp_path / "cache"
    assert not cache.exists() or not [each for each in cache.iterdir() if each.suffix != ".lock"]


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"the data in .*a\.(txt|jsonl) has no token: its texts are empty"),
        ("a.jsonl", b'{"text": ""}\n', r"the data in .*a\.(txt|jsonl) has no token: its texts are empty"),
        ("a.jsonl", b"", r"a\.jsonl cannot be read: "),
        ("a.txt", b"x" * 99 + b"\xc3(", r"a\.txt cannot be read: 'utf-8' codec can't decode byte 0xc3 in position 99"),
        ("a.txt", "é".encode() * 50 + b"\xe2\x82", r"a\.txt cannot be read: 'utf-8' codec can't decode .*unexpected end"),
        ("a.txt", b"y" * (3 << 20) + b"\xff", r"a\.txt cannot be read: 'utf-8' codec can't decode byte 0xff"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.jsonl cannot be read: .*(?i:utf-8)"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl cannot be read: Expected object or value"),
        ("a.jsonl", b'{"txt": "a", "id": 1}', r"unknown field 'text'; did you mean 'txt'\? Known: id, txt\. .*by `field: NAME`"),
        ("a.jsonl", b'{"text": 3}', r"'text' must contain a text, but contains .*int64.*, in columns 'input_ids'"),
        ("a.jsonl", b'{"text": "a"}\n{"text": null}\n', r"a\.jsonl, rows 0 to 1: a row has no text: its value is null"),
        ("a.parquet", b"nothing", r"a\.parquet cannot be read: .*[Pp]arquet"),
        ("a.csv", b"a,b", r"a\.csv: unknown ending of a data file '\.csv'.* Known: .*\.jsonl"),
        ("a.txt.gz", b"a,b", r"a\.txt\.gz: unknown ending of a data file '\.txt\.gz'.* Known: .*\.jsonl\.gz"),
        ("a.jsonl.gz", b"nothing", r"a\.jsonl\.gz cannot be read: "),
    ],
)  # fmt: skip
def test_invalid_data_is_refused(samples, write, tmp_path, name, content, message):
    refused(samples, tmp_path, message, write(name, content))


@pytest.mark.parametrize(
    ("task", "packing", "message"),
    [
        ("causal", "packed", r"is too short: a sample has 64 tokens, but the data has 41"),
        ("seq2seq", "packed", r"is too short: a sample has 128 tokens, but the data has 41"),
        ("seq2seq", "padded", r"packing=padded makes a sample of a document, but sequence to sequence"),
        ("image", "packed", r"the model classifies images"),
    ],
)
def test_data_that_a_task_has_no_sample_of_is_refused(samples, write, task, packing, message):
    with pytest.raises(WorkloadError, match=message):
        samples(write("a.txt", "x" * 40), seq_len=64, task=task, packing=packing)


def test_tokens_of_another_vocabulary_are_refused(samples, write, tmp_path, bpe):
    text = write("a.txt", "the redline is the highest engine speed short of damage " * 9)
    refused(samples, tmp_path, r"a\.txt: text by bytes needs a vocabulary of at least 259 tokens, but the model has 258",
            text, vocab_size=258)  # fmt: skip
    for _ in range(2):  # also of tokens that are there already
        with pytest.raises(
            WorkloadError, match=r"a\.txt: the data has token \d+ .*, but the model's vocabulary has 100"
        ):
            samples(text, tokenizer=bpe[0], vocab_size=100)


def test_missing_files_are_refused(samples, tmp_path, write):
    refused(samples, tmp_path, r"the data file or folder .*nothing\.txt does not exist", tmp_path / "nothing.txt")
    (tmp_path / "empty").mkdir()
    refused(samples, tmp_path, r"the folder .*empty contains no data: no file ends in \.txt", tmp_path / "empty")
    write("both/a.txt", "a"), write("both/b.jsonl", "b")
    refused(samples, tmp_path, r"contains data of several kinds \(json, text\); name the files", tmp_path / "both")
    write("splits/dataset_dict.json", "{}"), write("splits/test/state.json", "{}")
    refused(samples, tmp_path, r"has no split 'train'; give the folder of one of test", tmp_path / "splits")
    more = write("a.jsonl", [{"input_ids": [5, 6]}])
    refused(samples, tmp_path, r"mixes text and tokens rows; give data of one kind", tmp_path / "both/a.txt", more)
    text = write("a.txt", "text")
    refused(samples, tmp_path, r"contains no tokenizer; give the folder that its tokenizer\.json is in", text,
            tokenizer=str(tmp_path / "both"))  # fmt: skip


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"paths": "a.txt"}, r"but got 'a\.txt'"),
        ({"packing": "pack"}, r"unknown packing 'pack'; did you mean 'packed'\? Known: packed, padded"),
        ({"packing": "documents"}, r"padded makes a sample of each document"),
        ({"held_out": 0.6}, r"held_out must be a share from 0 to 0\.5, but got 0\.6"),
        ({"held_out": float("nan")}, r"but got nan"),
        ({"field": ""}, r"must be the name of a column, but is empty"),
    ],
)
def test_a_plan_is_checked(wrong, message):
    with pytest.raises(UsageError, match=message):
        DataPlan(**{"paths": ("a.txt",), **wrong})
