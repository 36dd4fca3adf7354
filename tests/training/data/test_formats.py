"""Every file format gives the documents in the file."""

import gzip
import json
import struct
import tracemalloc
from types import SimpleNamespace

import numpy as np
import pytest
from redline.base.errors import MissingDependency, WorkloadError
from redline.models.data import BYTE_OFFSET
from redline.training.data import documents, preparing, store
from texts import TOPICS

RECORDS = [{"id": number, "text": text[:300]} for number, text in enumerate(TOPICS[:25])]


def stream(samples):
    """Returns all tokens of packed samples in order."""
    return samples(0, len(samples))["input_ids"].flatten().tolist()


def by_bytes(texts):
    return [token for text in texts for token in [*(byte + BYTE_OFFSET for byte in text.encode()), 1]]


@pytest.fixture
def tokens(samples):
    """Returns a function that reads all tokens of data and the number of documents."""

    def read(*paths, **plan):
        made = samples(*paths, seq_len=1, shuffle=False, packing="packed", **plan)
        return stream(made), made.describe()["documents"]

    return read


def test_json_lines_parquet_and_datasets_hold_the_same(tokens, write, tmp_path):
    import datasets
    import pyarrow as arrow
    import pyarrow.parquet

    wanted = by_bytes(each["text"] for each in RECORDS), len(RECORDS)
    assert tokens(write("a.jsonl", RECORDS)) == wanted
    arrow.parquet.write_table(arrow.Table.from_pylist(RECORDS), tmp_path / "a.parquet", row_group_size=7)
    assert tokens(tmp_path / "a.parquet") == wanted
    table = datasets.Dataset.from_list(RECORDS)
    table.save_to_disk(tmp_path / "saved")
    assert tokens(tmp_path / "saved") == wanted
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(tmp_path / "splits")
    assert tokens(tmp_path / "splits") == wanted
    renamed = table.rename_column("text", "body")
    renamed.save_to_disk(tmp_path / "renamed")
    assert tokens(tmp_path / "renamed", field="body") == wanted


@pytest.mark.parametrize("name", ["a.jsonl.gz", "a.NDJSON.GZ", "folder/train-1.jsonl.gz"])
def test_gzip_files_are_read_unchanged(tokens, write, tmp_path, name):
    lines = "".join(json.dumps(each) + "\n" for each in RECORDS).encode()
    path = write(name, gzip.compress(lines[:999]) + gzip.compress(lines[999:]))  # as `cat a.gz b.gz` makes it
    write("folder/README.md.gz", gzip.compress(b"about"))
    assert tokens(tmp_path / "folder" if "/" in name else path) == (
        by_bytes(each["text"] for each in RECORDS), len(RECORDS)
    )  # fmt: skip
    text = "\ufeffé" + TOPICS[0]
    assert tokens(write("b.txt.gz", gzip.compress(text.encode()))) == (by_bytes([text[1:]]), 1)


def test_how_much_is_read_grows_to_all_of_it(samples, write, tmp_path, monkeypatch):
    import datasets
    import pyarrow as arrow
    import pyarrow.parquet

    monkeypatch.setattr(preparing, "REPORT_S", 0.0)
    monkeypatch.setattr(documents, "PIECE", 5000)
    many = RECORDS * 20
    lines = "".join(json.dumps(each) + "\n" for each in many).encode()
    arrow.parquet.write_table(arrow.Table.from_pylist(many), tmp_path / "a.parquet")
    datasets.Dataset.from_list(many).save_to_disk(tmp_path / "saved")
    np.arange(1, 500, dtype=np.uint16).tofile(tmp_path / "a.bin")
    np.arange(1, 500, dtype=np.uint16).tofile(tmp_path / "b.bin")
    paths = [
        [write("a.jsonl", lines), write("b.jsonl", lines)], [write("a.jsonl.gz", gzip.compress(lines))],
        [tmp_path / "a.parquet"], [tmp_path / "saved"], [write("a.txt", lines)],
        [tmp_path / "a.bin", tmp_path / "b.bin"],
    ]  # fmt: skip
    for number, some in enumerate(paths):
        shares = []
        samples(*some, on_read=shares.append, cache=f"cache{number}")
        assert shares == sorted(shares) and 0 <= shares[0] <= shares[-1] <= 1
        if number < 5:
            assert shares[-1] == 1 and len(shares) > 10
        else:
            assert shares == [0, 0.5]
    # Cached data is not read again.
    samples(*paths[0], on_read=shares.append, cache="cache0")
    assert shares == [0, 0.5]


def test_text_files_are_a_document_each_in_the_order_given(tokens, write):
    one, two = write("b.txt", "\ufeffred line\n"), write("a.md", "é\n\nx")
    assert tokens(one, two) == (by_bytes(["red line\n", "é\n\nx"]), 2)


def test_a_folder_is_read_by_name_without_what_is_only_about_the_data(tokens, write, tmp_path):
    write("data/part-1.jsonl", RECORDS[5:9])
    write("data/part-0.jsonl", RECORDS[:5])
    write("data/README.md", "# about")
    write("data/.hidden.jsonl", "{")
    write("data/dataset_infos.json", "{}")
    assert tokens(tmp_path / "data") == (by_bytes(each["text"] for each in RECORDS[:9]), 9)


def test_the_training_split_of_a_folder_is_read(tokens, write, tmp_path):
    write("data/train-00000.jsonl", RECORDS[:3])
    write("data/test-00000.jsonl", RECORDS[3:])
    assert tokens(tmp_path / "data") == (by_bytes(each["text"] for each in RECORDS[:3]), 3)


def test_a_long_text_is_cut_only_where_a_tokenizer_cuts_too(tokens, write, bpe, monkeypatch):
    text = "\n".join(TOPICS[:20])
    folder, tokenizer = bpe
    wanted = [*tokenizer(text, verbose=False)["input_ids"], tokenizer.eos_token_id], 1
    path = write("long.txt", text)
    monkeypatch.setattr(documents, "PIECE", 1000)
    assert len(list(documents._text(documents.Path(path)))) > 20
    assert tokens(path, tokenizer=folder) == wanted


def test_a_character_on_the_edge_of_what_is_read_at_once_stays_whole(tokens, write, monkeypatch):
    monkeypatch.setattr(documents, "PIECE", 7)
    text = "aé€😀" * 40  # no line, no space to cut at
    assert tokens(write("a.txt", text)) == (by_bytes([text]), 1)


def test_a_tokenizer_s_special_tokens_surround_documents(tokens, write, tokenizer_folder):
    from tokenizers import Tokenizer, processors

    folder = tokenizer_folder()
    bpe = Tokenizer.from_file(f"{folder}/tokenizer.json")
    begin, end = bpe.token_to_id("<|im_start|>"), bpe.token_to_id("<|end|>")
    plain = bpe.encode("red").ids
    assert tokens(write("a.txt", "red"), tokenizer=folder)[0] == [*plain, end]
    bpe.post_processor = processors.TemplateProcessing(
        single="<|im_start|> $A <|end|>", special_tokens=[("<|im_start|>", begin), ("<|end|>", end)]
    )
    bpe.save(f"{folder}/tokenizer.json")
    found, _ = tokens(write("a.jsonl", [{"text": "red"}, {"text": "red"}]), tokenizer=folder)
    assert found == [begin, *plain, end] * 2


def test_nanogpt_s_tokens_are_read_where_they_lie(tokens, samples, tmp_path, bpe):
    folder, tokenizer = bpe
    end = tokenizer.eos_token_id
    parts = [[10, 11, end, 12, 13], [14, end, end, 500, 15, 16]]
    for number, part in enumerate(parts):
        np.array(part, dtype=np.uint16).tofile(tmp_path / f"shard-{number}.bin")
    paths = [tmp_path / "shard-0.bin", tmp_path / "shard-1.bin"]
    assert tokens(*paths) == (parts[0] + parts[1], None)
    assert not any(each.suffix == ".bin" and each.stat().st_size for each in (tmp_path / "cache").rglob("tokens.bin"))
    # With the tokenizer the starts of documents are known; a file's end ends a document too. Samples span files.
    assert tokens(*paths, tokenizer=folder)[1] == 5
    made = samples(*paths, seq_len=4, shuffle=False, packing="documents", tokenizer=folder)
    assert made(0, 2)["input_ids"].tolist() == [[10, 11, end, 12], [13, 14, end, end]]
    assert made(0, 2)["position_ids"].tolist() == [[0, 1, 2, 0], [0, 0, 1, 0]]
    np.array([70_000, 3], dtype=np.uint32).tofile(tmp_path / "wide.bin")
    assert tokens(tmp_path / "wide.bin", vocab_size=70_001)[0] == [70_000, 3]


def megatron(prefix, sequences, documents, code, dtype):
    """Writes megatron.core.datasets.indexed_dataset's format, independently of redline."""
    np.concatenate([np.array(each, dtype=dtype) for each in sequences]).tofile(f"{prefix}.bin")
    sizes = [len(each) for each in sequences]
    pointers = [sum(sizes[:number]) * np.dtype(dtype).itemsize for number in range(len(sizes))]
    with open(f"{prefix}.idx", "wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, code, len(sizes), len(documents)))
        file.write(struct.pack(f"<{len(sizes)}i", *sizes) + struct.pack(f"<{len(sizes)}q", *pointers))
        file.write(struct.pack(f"<{len(documents)}q", *documents))


@pytest.mark.parametrize(("code", "dtype"), [(8, np.uint16), (4, np.int32), (5, np.int64)])
@pytest.mark.parametrize("named", ["corpus", "corpus.bin", "corpus.idx", "."])
def test_megatron_s_tokens_have_the_documents_of_their_index(samples, tokens, tmp_path, code, dtype, named):
    (tmp_path / "data").mkdir()
    sequences = [[10, 11, 12], [13], [14, 15, 16, 17], [18, 19]]
    megatron(tmp_path / "data" / "corpus", sequences, [0, 2, 2, 3, 4], code, dtype)  # of two sequences, none, one, one
    path = tmp_path / "data" / named
    assert tokens(path) == (list(range(10, 20)), 3)
    batch = samples(path, seq_len=5, shuffle=False, packing="padded")(0, 3)
    assert batch["labels"].tolist() == [
        [10, 11, 12, 13, -100], [14, 15, 16, 17, -100], [18, 19, -100, -100, -100]
    ]  # fmt: skip


def damaged(data, at, new):
    return data[:at] + new + data[at + len(new) :]


@pytest.mark.parametrize(
    ("index", "message"),
    [
        (lambda data: b"MMIDIDY" + data[7:], r"is not an index of Megatron: it does not begin with MMIDIDX"),
        (lambda data: b"", r"is not an index of Megatron"),
        (lambda data: damaged(data, 9, b"\x02"), r"has version 2 and type 8; known are version 1"),
        (lambda data: damaged(data, 17, b"\x06"), r"has version 1 and type 6; known are version 1"),
        (lambda data: data[:-40], r"is cut short: it has \d+ bytes for 4 sequences"),
        (lambda data: damaged(data, 34, struct.pack("<i", 4)), r"sequences do not follow each other"),
        (lambda data: damaged(data, 34, struct.pack("<i", -1)), r"sequences do not follow each other"),
        (lambda data: data[:-8] + struct.pack("<q", 3), r"is damaged: its documents are not those of its 4"),
    ],
)
def test_a_damaged_index_is_refused(tokens, tmp_path, index, message):
    megatron(tmp_path / "corpus", [[10, 11, 12], [13], [14, 15], [18]], [0, 2, 3, 4], 8, np.uint16)
    (tmp_path / "corpus.idx").write_bytes(index((tmp_path / "corpus.idx").read_bytes()))
    with pytest.raises(WorkloadError, match=message):
        tokens(tmp_path / "corpus")


def test_an_index_of_other_tokens_is_refused(tokens, tmp_path):
    megatron(tmp_path / "corpus", [[10, 11, 12], [13]], [0, 1, 2], 8, np.uint16)
    with (tmp_path / "corpus.bin").open("ab") as file:
        file.write(b"\0\0")
    with pytest.raises(WorkloadError, match=r"has 10 bytes, but its index names 4 tokens of 2 bytes"):
        tokens(tmp_path / "corpus")


def test_a_missing_reader_package_is_named(tokens, write, tmp_path, monkeypatch):
    def missing(name):
        raise ImportError(name)

    write("saved/state.json", "{}")
    write("saved/dataset_info.json", "{}")
    path = write("a.parquet", b"PAR1")
    monkeypatch.setattr(documents.importlib, "import_module", missing)
    with pytest.raises(MissingDependency, match=r"Parquet are read by pyarrow: `pip install pyarrow`"):
        tokens(path)
    with pytest.raises(MissingDependency, match=r"datasets folders are read by datasets: `pip install datasets`"):
        tokens(tmp_path / "saved")


def test_a_corpus_is_never_in_memory_at_once(samples, tmp_path):
    line = json.dumps({"text": "".join(TOPICS)[:100_000]}) + "\n"
    with (tmp_path / "big.jsonl").open("w") as file:
        for _ in range(400):
            file.write(line)
    tracemalloc.start()
    made = samples(tmp_path / "big.jsonl", seq_len=512, packing="packed")
    made(0, 8)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert made.describe()["tokens"] == 400 * (len("".join(TOPICS)[:100_000].encode()) + 1)
    assert peak < 24 << 20, f"{peak >> 20} MiB for 40 MB of text, 80 of tokens"


@pytest.mark.parametrize(
    ("names", "read"),
    [
        (("books.txt", "trains_and_planes.txt"), ("books.txt", "trains_and_planes.txt")),
        (("train-0.txt", "train-1.txt", "validation-0.txt"), ("train-0.txt", "train-1.txt")),
        (("train.txt", "more.txt"), ("more.txt", "train.txt")),
    ],
    ids=str,
)
def test_only_names_of_splits_choose_files_of_a_folder(names, read, write, tokens, tmp_path):
    folder = tmp_path / "texts"
    folder.mkdir()
    for name in names:
        (folder / name).write_text(f"{name}\n")
    found, _ = tokens(folder)
    assert found == by_bytes([f"{name}\n" for name in read])


def test_texts_without_a_token_are_refused(tmp_path):
    encoder = SimpleNamespace(name="bpe", dtype=np.dtype("uint16"), end_id=None, pad_id=None, mask_id=None)
    with pytest.raises(WorkloadError, match="the data has no token by the tokenizer in bpe"):
        store.write_texts(tmp_path, [], encoder, vocab_size=10, conversations=False, masked=False)
