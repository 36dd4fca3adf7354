"""Packed documents that are kept apart give the same results as each document alone."""

from itertools import pairwise

import pytest
import torch
from numerics_table import FAMILIES, tiny
from redline.base.errors import WorkloadError
from redline.trainer.data import check_packing

APART = ["deepseek_v3", "gpt2", "gpt_neo", "gpt_neox", "llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe"]


def built(family, attention="eager"):
    torch.manual_seed(0)
    model = tiny(family).build_model({"attention": attention})
    for parameter in model.parameters():  # large weights, so that attention has an effect
        torch.nn.init.normal_(parameter, std=0.3) if parameter.dim() > 1 else None
    return model.eval()


@pytest.fixture
def packed(samples, write):
    """A sample of 32 tokens with four documents, as bytes reduced to a small vocabulary, and the bounds of the
    documents."""
    texts = ["0123456", "another", "third of them", "and one more"]
    batch = samples(
        write("a.jsonl", [{"text": each} for each in texts]), seq_len=32, packing="documents", shuffle=False
    )(0, 1)
    batch["input_ids"] = batch["input_ids"] % 80 + 3
    return batch, [0, 8, 16, 30, 32]


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@pytest.mark.parametrize("family", [each for each in APART if each != "gpt_neo"])
def test_a_packed_document_has_the_logits_it_has_alone(packed, family, attention):
    batch, bounds = packed
    model = built(family, attention)
    with torch.no_grad():
        whole = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        across = model(input_ids=batch["input_ids"]).logits
        for begin, end in pairwise(bounds):
            alone = model(input_ids=batch["input_ids"][:, begin:end]).logits
            assert torch.allclose(whole[:, begin:end], alone, rtol=1e-5, atol=2e-5), (begin, end)
    assert (whole - across)[:, 8:].abs().max() > 0.1  # without positions documents do attend to each other


def test_models_are_tried_and_those_that_let_documents_mix_are_refused():
    found = {}
    for family, (task, _) in FAMILIES.items():
        if task == "causal":
            model = tiny(family).build_model({})
            model.train()
            try:
                check_packing(model)
                found[family] = True
            except WorkloadError as error:
                assert "the tokens of one document depend on another; give packing=packed" in str(error)
                found[family] = False
            assert model.training
    assert sorted(each for each, good in found.items() if good) == APART
    assert [each for each, good in found.items() if not good] == ["opt"]


def test_the_tasks_that_have_no_such_packing_refuse_it(samples, write):
    path = write("a.txt", "some text")
    for task, packing, message in [
        ("masked", "documents", r"packing=documents is for causal language models, and this one's task is masked"),
        ("seq2seq", "documents", r"this one's task is seq2seq"),
        ("seq2seq", "padded", r"packing=padded makes a sample of a document, but sequence to sequence"),
        ("image", "packed", r"the model classifies images"),
    ]:
        with pytest.raises(WorkloadError, match=message):
            samples(path, task=task, packing=packing)
