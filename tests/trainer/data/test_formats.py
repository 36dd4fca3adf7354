"""Every file format gives the documents in the file."""

import gzip
import json
import tracemalloc

import pytest
from redline.base.errors import WorkloadError
from redline.models.data import BYTE_OFFSET
from redline.trainer.data import preparing
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
    path = write(name, gzip.compress(lines))
    write("folder/README.md", b"about")
    assert tokens(tmp_path / "folder" if "/" in name else path) == (
        by_bytes(each["text"] for each in RECORDS), len(RECORDS)
    )  # fmt: skip


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


def test_a_text_file_is_one_document_although_it_is_tokenised_in_pieces(tokens, write, bpe, monkeypatch):
    text = "\n".join(TOPICS[:20])
    folder, tokenizer = bpe
    monkeypatch.setattr(preparing, "LINES", 7)
    assert text.count("\n") > 20
    ids, documents = tokens(write("long.txt", text), tokenizer=folder)
    assert documents == 1 and ids.count(tokenizer.eos_token_id) == 1 and ids[-1] == tokenizer.eos_token_id
    assert tokenizer.decode(ids[:-1]) == text


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


def test_a_tokenised_data_set_is_taken_as_it_is(samples, tokens, write, tmp_path):
    rows = [{"input_ids": [10, 11, 12]}, {"input_ids": []}, {"input_ids": [13, 14]}]
    assert tokens(write("a.jsonl", rows))[0] == [10, 11, 12, 13, 14]
    labelled = [
        {"input_ids": [10, 11, 12, 13], "labels": [-100, -100, 12, 13]},
        {"input_ids": [14, 15], "labels": [14, -100]},  # nothing to predict: the first token of a sample is not
    ]
    made = samples(write("b.jsonl", labelled), seq_len=5, packing="padded")
    assert len(made) == 1 and made(0, 1)["labels"].tolist() == [[-100, -100, 12, 13, -100]]
    with pytest.raises(WorkloadError, match="'labels' must be those of 'input_ids', or -100"):
        samples(write("c.jsonl", [{"input_ids": [10, 11], "labels": [11, 12]}]))
    with pytest.raises(WorkloadError, match="has token 700 .*, but the model's vocabulary has 600"):
        samples(write("d.jsonl", [{"input_ids": [10, 700] * 9}]))
    with pytest.raises(WorkloadError, match="negative"):
        samples(write("e.jsonl", [{"input_ids": [10, -1] * 9}]))
    with pytest.raises(
        WorkloadError, match="token files of nanoGPT and Megatron are not read; give the texts, or a data"
    ):
        samples(write("f.bin", b"1234"))


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
    assert peak < 100 << 20, f"{peak >> 20} MiB for 40 MB of text, which are 200 of tokens and masks"
