"""A Python script on redline itself: the model with its schedule, trained on a text, under torchrun."""

import pprint

from ...errors import UsageError
from ...writing import as_data
from .common import ADAMW
from .setup import Setup
from .target import Target, hashed

# What the configuration needs is done by redline.models.Training, which the trials ran too; the script is the
# loop around it. Placeholders in angle brackets stand where the run's own values go.
_TEMPLATE = """\
<comment>import argparse
import gc
import os
import time

import torch
import torch.distributed as dist

import redline as rl
from redline.training import Training
from redline.schedule import full_state_dict

MODEL = <model>
SEQ_LEN = <seq_len>
GLOBAL_BATCH = <global_batch>
DEVICES = <devices>
START = <start>  # of each host
CONFIG = <config>


def main():
    parser = argparse.ArgumentParser(description=f"Trains {MODEL} in the configuration redline found.")
<data_option>    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--lr", type=float, default=<lr>, help="learning rate")
    parser.add_argument("--warmup", type=int, default=0, help="steps over which the learning rate rises")
    parser.add_argument("--seed", type=int, default=<seed>, help="of weights and data")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--save", help="where the trained weights go, a file for torch.load")
    args = parser.parse_args()

    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    local_rank = int(os.environ.get("LOCAL_RANK", 0))
    if world_size != DEVICES:
        parser.error(f"this configuration needs {DEVICES} processes, not {world_size}: "
                     f"{START} {os.path.basename(__file__)}")
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", local_rank) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    if world_size > 1:
        dist.init_process_group("nccl" if cuda else "gloo")

    workload = rl.workload(MODEL, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH<lora><data>)
    training = Training(workload, CONFIG, device, seed=args.seed, rank=rank, world_size=world_size, fresh_data=True)
    begin, reported = time.perf_counter(), 0
    for step in range(1, args.steps + 1):
        for group in training.optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / max(1, args.warmup))
        loss = training.step()
        if step % args.log_every == 0 or step in (1, args.steps):
            value = float(loss)  # reading it waits for the device
            now, steps = time.perf_counter(), step - reported
            ms, begin, reported = (now - begin) / steps * 1e3, now, step
            if rank == 0:
                print(f"step {step}  loss {value:.6f}  {ms:.1f} ms a step", flush=True)
    if args.save:
        weights = {name: each.cpu() for name, each in full_state_dict(training.model).items()}
        if CONFIG.get("pp", 1) > 1:  # every stage has the weights of its layers
            first = training.world.dp_rank == 0 and training.world.tp_rank == 0
            stages = [None] * world_size if rank == 0 else None
            dist.gather_object(weights if first else {}, stages)
            weights = {name: each for stage in stages or () for name, each in stage.items()}
        if rank == 0:
            torch.save(weights, args.save)


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
        dist.destroy_process_group()
"""
_DATA = '    parser.add_argument("--data", help="UTF-8 text to train on (its first 4 MiB); random tokens without it")\n'


def _python(setup: Setup, comment: str) -> str:
    if not setup.spec:
        raise UsageError(
            "the target python needs a model: this run tuned a callable, or its run.yaml is missing; "
            "the targets yaml, json and env work"
        )
    own = ".py:" in setup.spec
    if own:
        setup.note(f"the data is the workload's own ({setup.spec}); run the script where that file can be found")
    else:
        setup.note(
            "the text is an argument, --data corpus.txt (random tokens without it); a loader for more than "
            "its first 4 MiB, evaluation and checkpoints on the way are yours"
        )
    config = pprint.pformat(as_data(setup.take_all()), sort_dicts=False, width=100)
    values = {
        "comment": hashed(comment),
        "model": repr(setup.spec),
        "seq_len": repr(setup.seq_len),
        "global_batch": repr(setup.global_batch),
        "devices": repr(setup.devices),
        "start": repr(setup.torchrun()),
        "seed": repr(int(setup.seed)),
        "config": config,
        "lr": repr(ADAMW["lr"]),
        "data_option": "" if own else _DATA,
        "lora": f", lora={setup.lora!r}" if setup.lora else "",
        "data": "" if own else ", data=args.data",
    }
    # One pass, so that a value that looks like a placeholder stays what it is.
    parts = _TEMPLATE.split("<")
    text = parts[0]
    for part in parts[1:]:
        name, closed, rest = part.partition(">")
        text += values[name] + rest if closed and name in values else "<" + part
    return text


TARGET = Target(
    name="python",
    about="a training script on redline itself, with the model's schedule",
    stem="train",
    forms={"python": _python},
    start=lambda setup, file: f"{setup.torchrun()} {file}",
)
