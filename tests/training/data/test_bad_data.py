"""Unusable data is refused with a message, and nothing of it is kept."""

import gzip

import numpy as np
import pytest
from redline.base.errors import StudyError, UsageError, WorkloadError
from redline.training.data import DataPlan
from texts import CHATML


def refused(samples, tmp_path, message, *paths, error=WorkloadError, **more):
    with pytest.raises(error, match=message):
        samples(*paths, **more)
    cache = tmp_path / "cache"
    assert not cache.exists() or not [each for each in cache.iterdir() if each.suffix != ".lock"]


def damaged(data):
    return data[:-8] + bytes([data[-8] ^ 0xFF]) + data[-7:]  # its checksum


def zipped(data):
    return gzip.compress(data, mtime=0)  # the same in every process, as test names include it


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.txt", b"", r"the data in .*a\.txt is empty: give files with data to train on"),
        ("a.jsonl", b"\n\n", r"the data in .*a\.jsonl is empty"),
        ("a.jsonl", b'{"text": ""}\n', r"the data in .*a\.jsonl is empty"),
        ("a.bin", b"", r"a\.bin is empty: give one with tokens"),
        ("a.txt", b"x" * 99 + b"\xc3(", r"a\.txt is not UTF-8 text: byte 0xc3 at position 99"),
        ("a.txt", "é".encode() * 50 + b"\xe2\x82", r"a\.txt is not UTF-8 text: byte 0xe2 at position 100"),
        ("a.txt", b"y" * (3 << 20) + b"\xff", r"byte 0xff at position 3145728"),
        ("a.jsonl", b'{"text": "a"}\n{"text": "\xe9"}\n', r"a\.jsonl, line 2 is not UTF-8 text: byte 0xe9 at position 10"),
        ("a.jsonl", b'{"text": "a"}\n{"text": \n', r"a\.jsonl, line 2 is not JSON: .*each line must be a record"),
        ("a.json", b'[\n{"text": "a"}\n]', r"a\.json, line 1 is not JSON"),
        ("a.json", b'[{"text": "a"}]', r"line 1 must be a JSON object with the field 'text', but is list"),
        ("a.jsonl", b'{"txt": "a", "id": 1}', r"unknown field 'text'; did you mean 'txt'\? Known: id, txt\. .*by --field"),
        ("a.jsonl", b'{"text": 3}', r"line 1: 'text' must contain a text or a conversation .*, but contains int"),
        ("a.parquet", b"nothing", r"a\.parquet cannot be read as Parquet"),
        ("a.csv", b"a,b", r"a\.csv: unknown ending of a data file '\.csv'.* Known: \.bin, .*\.jsonl"),
        ("a.csv.gz", b"a,b", r"a\.csv\.gz: unknown ending of a data file '\.csv\.gz'.* Known: \.bin, .*\.jsonl\.gz"),
        ("a.parquet.gz", b"a", r"unknown ending of a data file '\.parquet\.gz'"),
        ("a.jsonl.gz", b"nothing", r"a\.jsonl\.gz cannot be unpacked by gzip: Not a gzipped file"),
        ("a.txt.gz", zipped(b"text" * 99)[:-9], r"a\.txt\.gz cannot be unpacked by gzip: Compressed file ended before"),
        ("a.jsonl.gz", damaged(zipped(b'{"text": "abc"}\n' * 99)), r"a\.jsonl\.gz cannot be unpacked by gzip: CRC"),
        ("a.txt.gz", zipped(b"x" * 99 + b"\xc3("), r"a\.txt\.gz is not UTF-8 text: byte 0xc3 at position 99"),
        ("a.txt.gz", zipped(b""), r"the data in .*a\.txt\.gz is empty"),
        ("a.bin", b"abc", r"a\.bin has 3 bytes, and tokens of a vocabulary of 600 have 2 each"),
    ],
)  # fmt: skip
def test_invalid_data_is_refused(samples, write, tmp_path, name, content, message):
    refused(samples, tmp_path, message, write(name, content))


@pytest.mark.parametrize(
    ("task", "packing", "message"),
    [
        ("causal", "packed", r"is too short: a sample has 64 tokens, but the data has 41"),
        ("causal", "documents", r"is too short: a sample has 64 tokens, but the data has 41"),
        ("seq2seq", "packed", r"is too short: a sample has 128 tokens, but the data has 41"),
    ],
)
def test_data_shorter_than_a_sample_is_refused(samples, write, task, packing, message):
    with pytest.raises(WorkloadError, match=message):
        samples(write("a.txt", "x" * 40), seq_len=64, task=task, packing=packing)


def test_one_sample_is_enough_but_not_to_hold_one_out(samples, write):
    path = write("a.txt", "x" * 15)
    made = samples(path)
    assert len(made) == 1 and made.ids(0, 3).tolist() == [0, 0, 0]
    with pytest.raises(WorkloadError, match=r"has one sample of 16 tokens, so none can be held out"):
        samples(path, held_out=0.1)


def test_tokens_of_another_vocabulary_are_refused(samples, write, tmp_path, bpe):
    text = write("a.txt", "the redline is the highest engine speed short of damage " * 9)
    refused(samples, tmp_path, r"a\.txt: text by bytes needs a vocabulary of at least 259 tokens, but the model has 258",
            text, vocab_size=258)  # fmt: skip
    refused(samples, tmp_path, r"a\.txt: the tokenizer in .* yields token \d+, but the model's vocabulary has 100; they do not",
            text, vocab_size=100, tokenizer=bpe[0])  # fmt: skip
    np.array([5, 599, 600, 3] * 9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    refused(samples, tmp_path, r"a\.bin contains token 600, but the model's vocabulary has 600", tmp_path / "a.bin")


def test_tokens_that_are_there_already_are_held_against_another_model_s_vocabulary(samples, write, bpe):
    text = write("a.txt", "the redline is the highest engine speed short of damage " * 9)
    samples(text, tokenizer=bpe[0])
    with pytest.raises(WorkloadError, match=r"yields token \d+, but the model's vocabulary has 100"):
        samples(text, tokenizer=bpe[0], vocab_size=100)


def test_tokens_of_another_width_are_refused(samples, tmp_path):
    np.arange(1, 500, dtype=np.uint32).tofile(tmp_path / "a.bin")
    refused(samples, tmp_path, r"a\.bin: every other token is 0, as if tokens had 4 bytes", tmp_path / "a.bin")


def test_documents_that_cannot_be_told_are_not_guessed(samples, tmp_path):
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "a.bin")
    with pytest.raises(WorkloadError, match=r"without the starts of documents, which packing=documents needs"):
        samples(tmp_path / "a.bin", packing="documents")


def test_missing_files_are_refused(samples, tmp_path, write):
    refused(samples, tmp_path, r"the data file or folder .*nothing\.txt does not exist", tmp_path / "nothing.txt")
    (tmp_path / "empty").mkdir()
    refused(samples, tmp_path, r"the folder .*empty contains no data: no file ends in \.txt", tmp_path / "empty")
    write("both/a.txt", "a"), write("both/b.jsonl", "b")
    refused(samples, tmp_path, r"contains data of several kinds \(jsonl, text\); name the files", tmp_path / "both")
    write("splits/dataset_dict.json", "{}"), write("splits/test/state.json", "{}")
    refused(samples, tmp_path, r"has no split 'train'; give the folder of one of test", tmp_path / "splits")
    np.arange(9, dtype=np.uint16).tofile(tmp_path / "a.bin")
    refused(
        samples, tmp_path, r"a\.bin contains tokens and .*b\.jsonl text", tmp_path / "a.bin", tmp_path / "both/b.jsonl"
    )
    write("alone.idx", b"MMIDIDX")
    refused(samples, tmp_path, r"need a \.bin and an \.idx, but .*alone\.bin does not exist", tmp_path / "alone.idx")
    text = write("a.txt", "text")
    refused(samples, tmp_path, r"contains no tokenizer; give the folder that its tokenizer\.json is in", text,
            tokenizer=str(tmp_path / "both"))  # fmt: skip


def test_an_unwritable_cache_is_reported(samples, write, tmp_path):
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(StudyError, match=r"cache' is a file"):
        samples(write("a.txt", "x" * 40))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"paths": "a.txt"}, r"but got 'a\.txt'"),
        ({"packing": "pack"}, r"unknown packing 'pack'; did you mean 'packed'\? Known: documents, packed, padded"),
        ({"train_on": "user"}, r"unknown train_on 'user'.* Known: all, assistant"),
        ({"held_out": 0.6}, r"held_out must be a share from 0 to 0\.5, but got 0\.6"),
        ({"held_out": float("nan")}, r"but got nan"),
        ({"field": ""}, r"must be the name of a column, but is empty"),
    ],
)
def test_a_plan_is_checked(wrong, message):
    with pytest.raises(UsageError, match=message):
        DataPlan(**{"paths": ("a.txt",), **wrong})


# -- rows that are left out ----------------------------------------------------------------------------------

GOOD = b'{"text": "a good row that is long enough"}\n'
BAD = [
    b"{no json\n",
    b'{"text": "\xe9"}\n',
    b"[1]\n",
    b'{"txt": "x"}\n',
    b'{"text": null}\n',
    b'{"text": [{"says": 1}]}\n',
]


def test_bad_rows_are_left_out_and_counted_where_that_is_asked_for(samples, write):
    path = write("a.jsonl", GOOD.join([b"", *BAD, b""]))
    with pytest.raises(WorkloadError, match=r"line 2 is not JSON"):
        samples(path)
    made, good = samples(path, skip_bad_rows=True), samples(write("b.jsonl", GOOD * 7))
    about = made.describe()
    assert about["skipped_rows"] == 6 and "a.jsonl, line 2 is not JSON" in about["first_skipped_row"]
    assert about["documents"] == 7 and about["tokens_digest"] == good.describe()["tokens_digest"]
    assert good.describe()["skipped_rows"] == 0
    assert samples(path, skip_bad_rows=True).describe() == about, "from the cache"


def test_conversations_that_cannot_be_written_are_bad_rows_too(samples, write, tokenizer_folder):
    messages = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "good day"}]
    template = CHATML.replace(
        "{% for m", "{% if messages[0].role != 'user' %}{{ raise_exception('first') }}{% endif %}{% for m"
    )
    path = write(
        "a.jsonl", [{"text": each} for each in (messages, messages[::-1], [{"from": "nobody", "value": ""}], messages)]
    )
    tokenizer = tokenizer_folder(template)
    with pytest.raises(WorkloadError, match="line 3"):
        samples(path, tokenizer=tokenizer)
    about = samples(path, tokenizer=tokenizer, skip_bad_rows=True, seq_len=64).describe()
    assert (about["documents"], about["skipped_rows"]) == (2, 2)


def test_only_bad_rows_refuse_the_first(samples, write, tmp_path):
    message = (
        r"all 2 rows are bad, so nothing is left to train on; the first: .*unknown field 'txt'; did you mean 'text'"
    )
    refused(samples, tmp_path, message, write("a.jsonl", GOOD * 2), skip_bad_rows=True, field="txt")
