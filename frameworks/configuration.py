"""Exports to redline and to no framework: a Python script that trains under torchrun, and the configuration itself as YAML,
JSON and shell variables.
"""

import pprint
import re
import shlex
from dataclasses import replace
from typing import Any

from ..base.errors import UsageError
from ..base.writing import as_data
from ..knobs.text import value_text
from .export_input import MEASURED_WITH, ExportInput, Target, as_json, as_yaml, hashed, sourced

# redline.accelerate applies the configuration; the script is the loop around it, for the user to change.
# Placeholders in angle brackets are replaced by the run's values.
_TEMPLATE = """\
<comment>import argparse
import gc
import os
import time

# As in the trials. OpenMP reads it once, when torch is imported.
<environment>
import torch
import torch.distributed as dist

import redline as rl

MODEL = <model>
SEQ_LEN = <seq_len>
GLOBAL_BATCH = <global_batch>
DEVICES = <devices>
START = <start>  # of each host
CONFIG = <config>


def main():
    parser = argparse.ArgumentParser(description=f"Trains {MODEL} in the configuration redline found.")
<data_option>    parser.add_argument("--steps", type=int, default=100, help="optimizer steps")
    parser.add_argument("--lr", type=float, help="learning rate; by default the optimizer's own")
    parser.add_argument("--warmup", type=int, default=0, help="steps over which the learning rate rises")
    parser.add_argument("--clip", type=float, help="largest norm of all gradients together")
    parser.add_argument("--seed", type=int, default=<seed>, help="of weights and data")
    parser.add_argument("--log-every", type=int, default=10, help="steps between two lines")
    parser.add_argument("--checkpoints", help="folder of checkpoints to continue from, and to save to")
    parser.add_argument("--save-every", type=int, default=1000, help="steps between two checkpoints; one more at the end")
    parser.add_argument("--save", help="file for the trained weights, for torch.load")
    args = parser.parse_args()

    world_size = int(os.environ.get("WORLD_SIZE", 1))
    if world_size != DEVICES:
        parser.error(f"this configuration needs {DEVICES} processes, not {world_size}: "
                     f"{START} {os.path.basename(__file__)}")

    workload = rl.workload(MODEL, seq_len=SEQ_LEN, global_batch=GLOBAL_BATCH<lora>)
    model, optimizer, loader, info = rl.accelerate(
        workload<data>, strategy=CONFIG, clip=args.clip, seed=args.seed
    )
    if args.checkpoints and info.load(args.checkpoints) and info.main:
        print(f"continuing from step {info.step}", flush=True)
    # After loading, which replaces the groups.
    rates = [(group, args.lr or group["lr"]) for group in optimizer.param_groups if args.lr or group.get("lr")]
    begin, reported = time.perf_counter(), info.step
    for batch in batches(loader, info, args.steps):
        step = info.step + 1
        for group, rate in rates:
            group["lr"] = rate * min(1.0, step / max(1, args.warmup))
        loss = model(**batch) if isinstance(batch, dict) else model(*batch)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % args.log_every == 0 or step in (1, args.steps):
            value = loss.item()  # reading it waits for the device
            now, steps = time.perf_counter(), step - reported
            ms, begin, reported = (now - begin) / steps * 1e3, now, step
            if info.main:
                print(f"step {step}  loss {value:.6f}  {ms:.1f} ms a step", flush=True)
        if args.checkpoints and (step % args.save_every == 0 or step == args.steps):
            info.save(args.checkpoints)
    if args.save:
        weights = info.state_dict()  # all ranks take part
        if info.main:
            torch.save(weights, args.save)


def batches(loader, info, steps):
    \"\"\"Yields the batches of the remaining steps, epoch after epoch.\"\"\"
    while info.step < steps:
        for batch in loader:
            yield batch
            if info.step >= steps:
                break


if __name__ == "__main__":
    main()
    if dist.is_initialized():
        gc.collect()  # meanwhile gloo's threads let go of their last tensors, at which an exit would abort
        dist.destroy_process_group()
"""
_DATA = '    parser.add_argument("--data", nargs="+", help="files to train on, as redline train takes them")\n'


def _python(setup: ExportInput, comment: str) -> str:
    if not setup.spec:
        raise UsageError(
            "the target python needs a model: this run tuned a callable, or its run.yaml is missing; "
            "the targets yaml, json and env work"
        )
    own_workload = ".py:" in setup.spec
    if own_workload:
        setup.note(f"the data is the workload's own ({setup.spec}); run the script where that file can be found")
    else:
        setup.note(
            "the data is an argument, --data corpus.txt (random tokens without it); evaluation and a falling learning rate are "
            "yours, or those of redline train"
        )
    config = pprint.pformat(as_data(setup.take_all()), sort_dicts=False, width=100)
    values = {
        "comment": hashed(comment),
        "model": repr(setup.spec),
        "seq_len": repr(setup.seq_len),
        "global_batch": repr(setup.global_batch),
        "devices": repr(setup.devices),
        "environment": "".join(
            f"os.environ.setdefault({name!r}, {value!r})\n" for name, value in MEASURED_WITH.items()
        ),
        "start": repr(setup.torchrun()),
        "seed": repr(int(setup.seed)),
        "config": config,
        "data_option": "" if own_workload else _DATA,
        "lora": f", lora={setup.lora!r}" if setup.lora else "",
        "data": "" if own_workload else ", args.data",
    }
    # One pass, so that a value that looks like a placeholder is not replaced.
    pieces = _TEMPLATE.split("<")
    script = pieces[0]
    for piece in pieces[1:]:
        name, closed, following = piece.partition(">")
        script += values[name] + following if closed and name in values else "<" + piece
    return script


PYTHON = Target(
    name="python",
    about="a training script on redline itself, with the model's schedule",
    stem="train",
    forms={"python": _python},
    sequences=("sp", "cp"),
    runs=True,
    uneven=True,
    start=lambda setup, file: f"{setup.torchrun()} {file}",
)


def _content(setup: ExportInput) -> dict[str, Any]:
    trial = setup.trial
    content: dict[str, Any] = {
        "model": setup.model or None,
        "lora": setup.lora or None,
        "trial": trial.number,
        "simulated": setup.simulated or None,
        "emulated": setup.emulated or None,
        "devices": setup.devices,
        "seq_len": setup.seq_len,
        "global_batch": setup.global_batch,
        "configuration": as_data(setup.take_all()),
    }
    if trial.measurement is not None:
        content["predicted" if setup.simulated else "measurement"] = trial.measured.figures()
    return {name: value for name, value in content.items() if value is not None}


def _env(setup: ExportInput, comment: str) -> str:
    values = {
        "model": setup.model or None,
        "lora": setup.lora or None,
        "devices": setup.devices,
        "seq_len": setup.seq_len,
        "global_batch": setup.global_batch,
        "dp": None if setup.command else setup.dp,
        "grad_accum": setup.grad_accum,
        **setup.take_all(),
    }
    lines = []
    names: dict[str, str] = {}
    for name, value in values.items():
        if value is None:
            continue
        variable = "REDLINE_" + re.sub(r"\W", "_", name, flags=re.ASCII).upper()
        if names.setdefault(variable, name) != name:
            raise UsageError(f"the knobs '{names[variable]}' and '{name}' would both be {variable}")
        lines.append(f"{variable}={shlex.quote(value_text(value))}\n")
    return hashed(comment) + "".join(lines)


YAML = Target(
    name="yaml",
    about="the configuration and its measurement",
    stem="redline",
    use=lambda file: f"yaml.safe_load(open({file!r}))['configuration']",
    forms={"yaml": as_yaml(_content)},
    sequences=("sp", "cp"),
    runs=True,
    uneven=True,
)
JSON = replace(
    YAML,
    name="json",
    use=lambda file: f"json.load(open({file!r}))['configuration']",
    forms={"json": as_json(_content)},
    silent=frozenset({"json"}),
)
ENV = replace(
    YAML,
    name="env",
    about="shell variables",
    use=lambda file: f"set -a; . {sourced(shlex.quote(file))}; set +a",
    forms={"env": _env},
)
