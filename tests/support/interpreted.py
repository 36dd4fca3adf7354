"""A program that runs tiny models with and without Liger's modules, in Triton's interpreter on a CPU.

Prints a line of JSON for each model: the replaced modules, and the differences of loss, logits and gradients.
"""

import copy
import json
import os
import sys

os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported
sys.path.append(os.path.join(sys.prefix, "beside"))  # see the Makefile

import numerics_table as numerics
import numpy as np
import torch
import triton.language as tl
from redline.estimator.facts.device_operators import forwards_of, put_forwards
from redline.schedule import comparison, create_schedule
from redline.schedule.liger import replace_modules
from triton.language.extra import libdevice
from triton.runtime import interpreter

GEMMA = {**numerics.FAMILIES["llama"][1], "head_dim": 8}
MORE = {"gemma": GEMMA, "gemma2": GEMMA}
LENGTH = 6


def complete():
    """Adds to the interpreter what it lacks: floats as arguments, and functions of CUDA's library."""
    convert = interpreter._implicit_cvt

    def converted(given):
        if isinstance(given, float):
            handle = interpreter.TensorHandle(np.array([given], dtype=np.float32), tl.float32)
            return tl.tensor(handle, tl.float32)
        return convert(given)

    interpreter._implicit_cvt = converted
    libdevice.tanh = lambda x: 2 * tl.sigmoid(2 * x) - 1
    libdevice.rsqrt = lambda x: tl.rsqrt(x)  # libdevice is looked up at each call


def model_of(family, seed):
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM

    arguments = MORE[family] if family in MORE else numerics.FAMILIES[family][1]
    config = AutoConfig.for_model(family, **arguments)
    torch.manual_seed(seed)
    kind = AutoModelForMaskedLM if family == "bert" else AutoModelForCausalLM
    model = kind.from_config(config, attn_implementation="eager")
    for _name, param in model.named_parameters():  # Gemma's norms begin at zero, others at one: all differ after this
        if param.dim() == 1:
            param.data.add_(0.1 * torch.randn_like(param))
    return model.train()


def passed(model, seed):
    """Returns loss, logits and gradients of one batch, and the bytes that were kept for backward besides parameters."""
    tokens = torch.randint(3, 97, (2, LENGTH), generator=torch.Generator().manual_seed(seed))
    own = {each.untyped_storage().data_ptr() for each in (*model.parameters(), *model.buffers())}
    kept = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        out = model(input_ids=tokens, labels=tokens)
    size = sum(nbytes for pointer, nbytes in kept.items() if pointer not in own)
    out.loss.backward()
    found = {name: param.grad for name, param in model.named_parameters() if param.grad is not None}
    return float(out.loss), out.logits.detach(), found, size


def compared(family, seed, fault):
    model = model_of(family, seed)
    other = copy.deepcopy(model)
    params = dict(other.named_parameters())
    done = replace_modules(create_schedule(other))
    kinds = sorted({type(other.get_submodule(path)).__name__ for path in done})
    kept = all(param is params[name] for name, param in other.named_parameters())
    if fault:
        norm = next(each for each in other.modules() if hasattr(each, "offset"))
        norm.offset = 1.0 - norm.offset
    traced = copy.deepcopy(model)
    put_forwards(traced, forwards_of(traced))
    loss, logits, gradients, plain_bytes = passed(model, seed)
    found_loss, found_logits, found, kept_bytes = passed(other, seed)
    *_, traced_bytes = passed(traced, seed)
    over = comparison.largest(gradients)
    departs = {name: comparison.departure(gradients[name], found[name], over) for name in gradients}
    return {
        "family": family,
        "replaced": done,
        "kinds": kinds,
        "kept": kept and list(model.state_dict()) == list(other.state_dict()),
        "bytes": [plain_bytes, kept_bytes, traced_bytes],
        "same_names": found.keys() == gradients.keys(),
        "loss": abs(found_loss - loss) / loss,
        "logits": comparison.departure(logits, found_logits),
        "gradient": max(departs.values()),
        "where": max(departs, key=departs.get),
        "allowed": comparison.allowance(model, 2 * LENGTH),
        "loss_allowed": comparison.loss_allowance(comparison.allowance(model, 2 * LENGTH), 2 * LENGTH),
    }


if __name__ == "__main__":
    complete()
    seed, fault = int(sys.argv[1]), sys.argv[2] == "fault"
    for each in sys.argv[3:]:
        print("RESULT", json.dumps(compared(each, seed, fault)), flush=True)
