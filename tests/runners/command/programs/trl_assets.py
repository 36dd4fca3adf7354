"""Writes the model, the tokenizer and the texts that `trl sft` reads: `python trl_assets.py FOLDER`.

The command takes its model's code from the model's folder, as of models of Hugging Face's hub that bring their own code; that
code has the clock.
"""

import json
import shutil
import sys
from pathlib import Path

HERE = Path(__file__).parent
VOCABULARY = 300
TEXT = "The quick brown fox jumps over the lazy dog."
MODELING = '''"""A Llama that takes a known time, and the clock of its training."""

import transformers.trainer
from transformers import LlamaForCausalLM, TrainerCallback

from .clock import Clock
from .cost import wait


class StepTimes(TrainerCallback):
    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.clock = Clock(args.process_index)
        self.evaluation = None
        model.register_forward_hook(self.after_forward)

    def after_forward(self, model, inputs, outputs):
        if model.training:
            self.clock.loss(outputs.loss.item())

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.clock.step(args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size)

    def on_prediction_step(self, args, state, control, **kwargs):
        if self.evaluation is None:
            self.evaluation = self.clock.apart("evaluation")
            self.evaluation.__enter__()

    def on_evaluate(self, args, state, control, **kwargs):
        self.evaluation.__exit__(None, None, None)
        self.evaluation = None


# The callbacks that every Trainer gets: the command has no option for them.
transformers.trainer.DEFAULT_CALLBACKS.append(StepTimes)


class TimedLlama(LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        self.register_forward_pre_hook(lambda model, inputs, keywords: wait(len(keywords["input_ids"])), with_kwargs=True)
'''


def tokenizer():
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    text = Tokenizer(models.BPE())
    text.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    text.decoder = decoders.ByteLevel()
    special = ["<pad>", "<s>", "</s>"]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=alphabet)
    text.train_from_iterator([TEXT], trainer)
    return text


def main(folder: Path) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=64,
    )
    LlamaForCausalLM(config).save_pretrained(folder / "model")
    written = json.loads((folder / "model" / "config.json").read_text())
    written |= {"auto_map": {"AutoModelForCausalLM": "modeling_timed.TimedLlama"}, "architectures": ["TimedLlama"]}
    (folder / "model" / "config.json").write_text(json.dumps(written))
    (folder / "model" / "modeling_timed.py").write_text(MODELING)
    for name in ("clock.py", "cost.py"):
        shutil.copy(HERE / name, folder / "model" / name)
    PreTrainedTokenizerFast(
        tokenizer_object=tokenizer(), pad_token="<pad>", bos_token="<s>", eos_token="</s>"
    ).save_pretrained(folder / "model")
    (folder / "data").mkdir()
    for split, count in (("train", 2048), ("test", 24)):
        lines = [json.dumps({"text": f"{TEXT} {number}"}) for number in range(count)]
        (folder / "data" / f"{split}.jsonl").write_text("\n".join(lines))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
