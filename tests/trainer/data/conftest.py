"""Data in files of all kinds, and tokenizers that are trained for the tests."""

import json

import pytest
from redline.trainer.data import DataPlan, prepare
from texts import TOPICS


@pytest.fixture(scope="session")
def tokenizer_folder(tmp_path_factory):
    """Returns `make()`, which writes a folder with a BPE of 500 tokens by GPT-2's rules."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    special = ["<|end|>", "<|pad|>", "<|im_start|>", "<|mask|>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    bpe.train_from_iterator(
        TOPICS[:20], trainers.BpeTrainer(vocab_size=500, special_tokens=special, initial_alphabet=alphabet)
    )

    def make():
        folder = tmp_path_factory.mktemp("tokenizer")
        given = {"eos_token": "<|end|>", "pad_token": "<|pad|>", "mask_token": "<|mask|>"}
        made = PreTrainedTokenizerFast(tokenizer_object=bpe, **given)
        made.save_pretrained(folder)
        return str(folder)

    return make


@pytest.fixture(scope="session")
def bpe(tokenizer_folder):
    """A tokenizer's folder, and the tokenizer."""
    from transformers import AutoTokenizer

    folder = tokenizer_folder()
    return folder, AutoTokenizer.from_pretrained(folder)


@pytest.fixture
def write(tmp_path):
    """Returns `write(name, content)`, which writes a file of bytes, of text, or of records as JSON lines."""

    def make(name, content):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(content, list):
            content = "".join(json.dumps(each) + "\n" for each in content)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return str(path)

    return make


@pytest.fixture
def samples(tmp_path):
    """Returns `samples(*paths, seq_len=..., **plan)`, which calls `prepare` on the files."""

    def make(*paths, seq_len=16, task="causal", vocab_size=600, pad_id=None, cache="cache", **plan):
        on_read = plan.pop("on_read", lambda share: None)
        asked = DataPlan(paths=tuple(map(str, paths)), **plan)
        sizes = {"seq_len": seq_len, "task": task, "vocab_size": vocab_size, "pad_id": pad_id}
        return prepare(asked, cache=tmp_path / cache, on_read=on_read, **sizes)

    return make
