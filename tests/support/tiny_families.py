"""Tiny models of all families, with dropout, a batch for each, and the results of one pass."""

import torch
import transformers

SPECIAL = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
SIZES = {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 64}
FAMILIES = {
    "bert": ("BertForMaskedLM", {"num_hidden_layers": 2, **SIZES}, "bert.encoder.layer.0.attention.self"),
    "gpt2": ("GPT2LMHeadModel", {"n_layer": 2, "n_embd": 32, "n_head": 4}, "transformer.h.0.attn"),
    "gpt_neo": (
        "GPTNeoForCausalLM",
        {"num_layers": 2, "hidden_size": 32, "num_heads": 4, "attention_types": [[["global", "local"], 1]]},
        "transformer.h.1.attn.attention",
    ),
    "opt": (
        "OPTForCausalLM",
        {"num_hidden_layers": 2, "hidden_size": 32, "num_attention_heads": 4, "ffn_dim": 64, "word_embed_proj_dim": 32},
        "model.decoder.layers.0.self_attn",
    ),
    "t5": (
        "T5ForConditionalGeneration",
        {"num_layers": 2, "d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 64, "decoder_start_token_id": 0},
        "decoder.block.1.layer.1.EncDecAttention",
    ),
    "albert": (
        "AlbertForMaskedLM",
        {"num_hidden_layers": 2, "embedding_size": 16, **SIZES},
        "albert.encoder.albert_layer_groups.0.albert_layers.0.attention",
    ),
    "llama": (
        "LlamaForCausalLM",
        {"num_hidden_layers": 2, "num_key_value_heads": 2, "attention_dropout": 0.1, **SIZES},
        "model.layers.0.self_attn",
    ),
    "roberta": ("RobertaForMaskedLM", {"num_hidden_layers": 2, **SIZES}, "roberta.encoder.layer.0.attention.self"),
    "vit": (
        "ViTForImageClassification",
        {"num_hidden_layers": 2, "image_size": 16, "patch_size": 8, "hidden_dropout_prob": 0.1, **SIZES},
        "vit.layers.0.attention",
    ),
}


def made(family, seed=0):
    kind, sizes, _ = FAMILIES[family]
    given = {} if family == "vit" else {"vocab_size": 96, **SPECIAL}
    torch.manual_seed(seed)
    cls = getattr(transformers, kind)
    return cls(cls.config_class(**sizes, **given))


def batch(family, size=2, length=12):
    generator = torch.Generator().manual_seed(1)
    if family == "vit":
        return {"pixel_values": torch.randn(size, 3, 16, 16, generator=generator), "labels": torch.arange(size) % 2}
    tokens = torch.randint(3, 96, (size, length), generator=generator)
    mask = torch.ones_like(tokens)
    mask[1, length - 3 :] = 0
    data = {"input_ids": tokens, "attention_mask": mask, "labels": tokens}
    return data if family in ("bert", "albert", "roberta") else {**data, "use_cache": False}


def trained(model, data):
    """Returns the loss and the gradients of one pass with dropout."""
    model.train()
    model.zero_grad()
    torch.manual_seed(3)
    loss = model(**data).loss
    loss.backward()
    return [loss.detach(), *(param.grad for param in model.parameters() if param.grad is not None)]


def same(one, other):
    return len(one) == len(other) and all(torch.equal(a, b) for a, b in zip(one, other))
