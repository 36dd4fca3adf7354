"""Conversations are formatted by the tokenizer's template, and only the assistant's messages are trained on."""

import pytest
from redline.base.errors import WorkloadError
from texts import MARKED

TALK = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Who are you?"},
    {"role": "assistant", "content": "A test."},
    {"role": "user", "content": "Why?"},
    {"role": "assistant", "content": "To fail."},
]
SHORT = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]


@pytest.fixture
def conversation(samples, write, tokenizer_folder):
    """Returns `read(template, *talks, **plan)`, which returns samples of conversations, and the tokenizer."""
    from transformers import AutoTokenizer

    def read(template, *talks, seq_len=120, **plan):
        folder = tokenizer_folder(template)
        path = write("talks.jsonl", [{"messages": each} for each in talks])
        plan = {"field": "messages", "shuffle": False, **plan}
        return samples(path, seq_len=seq_len, tokenizer=folder, **plan), AutoTokenizer.from_pretrained(folder)

    return read


def trained_text(row, tokenizer):
    """Returns the stretches of text that have labels."""
    stretches, inside = [], False
    for token, label in zip(row["input_ids"][0].tolist(), row["labels"][0].tolist()):
        assert label in (-100, token)
        if label != -100:
            stretches = stretches if inside else [*stretches, []]
            stretches[-1].append(token)
        inside = label != -100
    return [tokenizer.decode(each) for each in stretches]


def test_only_what_the_assistant_says_is_trained_on(conversation):
    end = "<|im_end|>"
    made, tokenizer = conversation(MARKED, TALK, SHORT)
    assert made.plan.packing == "padded" and made.plan.train_on == "assistant"
    row = made(0, 1)
    text = tokenizer.apply_chat_template(TALK, tokenize=False)
    length = len(tokenizer(text, add_special_tokens=False)["input_ids"])
    assert tokenizer.decode(row["input_ids"][0, :length]) == text
    assert row["input_ids"][0, length:].unique().tolist() == [tokenizer.pad_token_id]
    assert trained_text(row, tokenizer) == ["A test." + end, "To fail." + end]
    assert trained_text(made(1, 1), tokenizer) == ["Ho" + end]


def test_a_sample_in_which_the_assistant_says_nothing_is_left_out(conversation):
    question = {"role": "user", "content": "So long a question that no answer is left of it. " * 10}
    made, tokenizer = conversation(MARKED, [question, SHORT[1]], SHORT, seq_len=40)
    assert len(made) == 1 and made.describe()["unused_samples"] == 1
    assert trained_text(made(0, 1), tokenizer) == ["Ho<|im_end|>"]
    with pytest.raises(WorkloadError, match=r"nothing to train on: in none of 1 samples of 40 tokens .* train_on=all"):
        conversation(MARKED, [question, SHORT[1]], seq_len=40)


@pytest.mark.parametrize(
    ("record", "wrong"),
    [
        ({"messages": ["Hi"]}, r"a list of messages with role and content, but contains List"),
        ({"messages": [{"from": "human", "value": "Hi"}]}, r"but contains List\(\{'from'"),
        ({"messages": 7}, r"but contains Value\('int64'\)"),
    ],
)
def test_invalid_conversations_are_named(samples, write, tokenizer_folder, record, wrong):
    path = write("a.jsonl", [record])
    with pytest.raises(WorkloadError, match=wrong):
        samples(path, field="messages", tokenizer=tokenizer_folder(MARKED))


def test_conversations_can_be_packed(conversation):
    made, tokenizer = conversation(MARKED, SHORT, SHORT, SHORT, packing="packed", seq_len=48)
    one = tokenizer.apply_chat_template(SHORT, tokenize=True)["input_ids"]
    assert made(0, 1)["input_ids"][0].tolist() == (one * 3)[:48]
    assert made.describe()["documents"] == 3


def test_a_conversation_that_the_template_refuses_is_named(conversation):
    strict = "{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools') }}{% endif %}{% generation %}{{ m.content }}{% endgeneration %}{% endfor %}"  # fmt: skip  # noqa: E501
    with pytest.raises(
        WorkloadError, match=r"talks.jsonl, rows 0 to 1: the chat template of .* refuses .*: no tools; it"
    ):
        conversation(strict, SHORT, [*SHORT, {"role": "tool", "content": "x"}])
