import pytest
import torch
from redline.base.errors import WorkloadError
from redline.models import workload
from redline.models.data import BYTE_OFFSET, TokenBatches, read_text

TEXT = "The redline is the highest engine speed short of damage.\n" * 20


@pytest.fixture
def text(tmp_path):
    def make(content, name="text.txt"):
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    return make


@pytest.mark.parametrize("task", ["causal", "masked"])
def test_batches_follow_from_the_seed_alone(task):
    batches = TokenBatches(task=task, seq_len=20, vocab_size=300)
    first, again, other = batches(4, 7), batches(4, 7), batches(4, 8)
    assert set(first) == {"input_ids", "labels"}
    for key, value in first.items():
        assert value.shape == (4, 20) and value.dtype == torch.int64
        assert torch.equal(value, again[key])
        assert not torch.equal(value, other[key])


def test_causal_labels_are_the_inputs():
    batch = TokenBatches(task="causal", seq_len=20, vocab_size=300)(4, 0)
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].min() >= 0 and batch["input_ids"].max() < 300


def test_every_sequence_has_the_same_number_of_masked_tokens():
    batches = TokenBatches(task="masked", seq_len=128, vocab_size=1000)
    batch = batches(64, 0)
    chosen = batch["labels"] != -100
    assert (chosen.sum(dim=1) == 19).all()  # 15 % of 128
    # Tokens that are not chosen are unchanged; of the chosen ones, 80 % are the mask token and 10 % unchanged.
    inputs, labels = batch["input_ids"][chosen], batch["labels"][chosen]
    count = len(labels)
    assert (inputs == 999).sum() / count == pytest.approx(0.8, abs=0.05)
    assert (inputs == labels).sum() / count == pytest.approx(0.1, abs=0.03)


def test_without_a_tokenizer_text_is_read_by_bytes(text):
    read = read_text(text("aé"), seq_len=2, vocab_size=300)
    assert read.tokenizer == "bytes"
    assert read.tokens.tolist() == [byte + BYTE_OFFSET for byte in "aé".encode()]


def test_batches_are_windows_of_the_text(text):
    made = workload("gpt2-tiny", seq_len=16, data=text(TEXT))
    ids = made.batch(8, 3)["input_ids"]
    for row in ids:
        assert bytes((row - BYTE_OFFSET).tolist()).decode() in TEXT
    assert torch.equal(ids, made.batch(8, 3)["input_ids"])


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b"\x89PNG" + b"x" * 500, "not UTF-8 text: byte 0x89 at position 0"),
        (b"short", "too short: a sample has 64 tokens, but the text has 5"),
        (b"x" * 200 + b"\xc3", "not UTF-8 text: byte 0xc3 at position 200"),
    ],
)
def test_data_that_is_no_text_is_refused(text, content, message):
    with pytest.raises(WorkloadError, match=message):
        workload("gpt2-tiny", data=text(content))


@pytest.fixture
def with_tokenizer(folder):
    """Returns a function that writes a folder with a word tokenizer of a given size."""

    def make(words):
        from tokenizers import Tokenizer, models, pre_tokenizers
        from transformers import PreTrainedTokenizerFast

        path = folder("tokenized", model_type="bert", num_hidden_layers=1, hidden_size=16, vocab_size=40,
                      num_attention_heads=2, intermediate_size=16)  # fmt: skip
        vocabulary = {"[UNK]": 0, "[MASK]": 5, **{word: 10 + number for number, word in enumerate(words)}}
        tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
        tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
        PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="[UNK]", mask_token="[MASK]").save_pretrained(
            path
        )
        return path

    return make


def test_a_folder_s_tokenizer_is_used(with_tokenizer, text):
    path = with_tokenizer(["red", "line"])
    made = workload(path, seq_len=4, data=text("red line red line red line"))
    assert made.batch.text.tokenizer == str(path)
    assert made.batch.text.tokens.tolist() == [10, 11] * 3
    assert made.batch.text.mask_id == 5
    batch = made.batch(64, 0)
    assert 5 in batch["input_ids"] and 39 not in batch["input_ids"][batch["labels"] == -100]


def test_a_tokenizer_of_another_model_is_refused(with_tokenizer, text):
    path = with_tokenizer([f"w{number}" for number in range(60)])
    with pytest.raises(WorkloadError, match="yields token 69, but the model's vocabulary has 40"):
        workload(path, seq_len=2, data=text("w0 w59 w1"))


def test_a_broken_tokenizer_is_refused(with_tokenizer, text):
    path = with_tokenizer(["red"])
    (path / "tokenizer.json").write_text("{")
    with pytest.raises(WorkloadError, match=r"the tokenizer in .* cannot be loaded"):
        workload(path, seq_len=2, data=text("red red red"))
