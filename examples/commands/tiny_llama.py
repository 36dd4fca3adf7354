"""A small Llama with random weights, a tokenizer and some data, for LLaMA-Factory and LitGPT: `python tiny_llama.py FOLDER`.

FOLDER/model is a Hugging Face folder, FOLDER/data holds `count.json` and LLaMA-Factory's `dataset_info.json`; where litgpt is
installed FOLDER/litgpt is the same model as its checkpoint.
"""

import importlib.util
import json
import shutil
import sys
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

LAYERS, HIDDEN, HEADS, VOCABULARY, LENGTH = 4, 128, 4, 512, 512


def main(folder: Path) -> None:
    lines = [
        {"instruction": f"Count to {n}.", "input": "", "output": " ".join(map(str, range(1, n + 1)))}
        for n in range(1, 200)
    ]
    (folder / "data").mkdir(parents=True, exist_ok=True)
    (folder / "data" / "count.json").write_text(json.dumps(lines))
    (folder / "data" / "dataset_info.json").write_text(json.dumps({"count": {"file_name": "count.json"}}))

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    trainer = trainers.BpeTrainer(vocab_size=300, special_tokens=list(special.values()), initial_alphabet=alphabet)
    tokenizer.train_from_iterator((line["output"] for line in lines), trainer)
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder / "model")
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=HIDDEN,
        intermediate_size=4 * HIDDEN,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        max_position_embeddings=LENGTH,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder / "model")
    if importlib.util.find_spec("litgpt") is not None:
        of_litgpt(folder)


def of_litgpt(folder: Path) -> None:
    from litgpt import GPT, Config
    from litgpt.utils import save_config

    config = Config(
        name="tiny",
        n_layer=LAYERS,
        n_embd=HIDDEN,
        n_head=HEADS,
        block_size=LENGTH,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        intermediate_size=4 * HIDDEN,
        mlp_class_name="LLaMAMLP",
        norm_class_name="RMSNorm",
        bias=False,
        rotary_percentage=1.0,
        parallel_residual=False,
    )
    (folder / "litgpt").mkdir(exist_ok=True)
    torch.save(GPT(config).state_dict(), folder / "litgpt" / "lit_model.pth")
    save_config(config, folder / "litgpt")
    for each in (folder / "model").glob("tokenizer*"):
        shutil.copy(each, folder / "litgpt")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
