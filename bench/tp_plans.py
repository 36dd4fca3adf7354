"""Counts the architectures that can be sharded over two ranks among those with a tensor-parallel plan in transformers.

    python bench/tp_plans.py --write bench/results/tp-plans.md     # all, some minutes
    python bench/tp_plans.py phi3 olmo2

Each is built without memory at its configuration's default sizes, in a process of its own that is ended after
`LIMIT_S`. If it can compute without memory, the sharded model must too. Prints a line with the reason for each
architecture that is refused or not made, and the counts; `--write` writes them as a table.
"""

import importlib
import inspect
import multiprocessing
import sys
import warnings
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from time import monotonic
from typing import Any

import torch
import transformers
from common import markdown, parser
from redline.models.families import schedule_of
from redline.schedule import create_schedule
from redline.schedule.parallel.collectives import PlannedMesh
from transformers import AutoModel, AutoModelForCausalLM, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING

LIMIT_S = 120
"""Longest time of one architecture."""
ERRORS = (AttributeError, ImportError, IndexError, KeyError, RuntimeError, TypeError, ValueError)
"""Errors of models at sizes that do not fit together, or without the inputs that they need."""
CUT = ""
"""The outcome of an architecture that can be sharded."""


def main() -> int:
    """Tries every architecture, or the named ones."""
    arguments = parser(__doc__)
    arguments.add_argument("names", nargs="*")
    arguments.add_argument("--write", type=Path, help="a Markdown file")
    options = arguments.parse_args()
    warnings.filterwarnings("ignore")
    names = options.names or [name for name in sorted(CONFIG_MAPPING.keys()) if planned(name)]
    outcomes = {name: tried(name) for name in names}
    if options.write:
        options.write.write_text(table(outcomes), encoding="utf-8")
    print(summary(outcomes))
    return 0


def tried(name: str) -> str:
    """Returns why an architecture cannot be sharded; empty if it can."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=_try, args=(name, theirs), daemon=True)
    began = monotonic()
    child.start()
    theirs.close()
    try:
        found = str(ours.recv()) if ours.poll(LIMIT_S) else f"not made: it takes more than {LIMIT_S} s"
    except EOFError:
        child.join()
        found = f"not made: its process ended with exit code {child.exitcode}"
    child.kill()
    child.join()
    print(f"{name} ({monotonic() - began:.1f} s): {found or 'sharded'}", flush=True)
    return found


def _try(name: str, answers: Connection) -> None:
    torch.set_num_threads(1)
    try:
        model = made(CONFIG_MAPPING[name])
    except ERRORS as error:
        answers.send(f"not made: its default sizes make no model ({_first_line(error)})")
        return
    answers.send(schedule_of(name).support(create_schedule(model)).tp(2) or _failure(name, model))


def _failure(name: str, model: torch.nn.Module) -> str:
    """Why the sharded model cannot compute though the whole one can; empty if it can, or if the whole one cannot either."""
    with suppress(*ERRORS):
        _compute(model)
        sch = create_schedule(model, PlannedMesh(tp=2))
        schedule_of(name)(sch, {"tp": 2})
        try:
            _compute(sch.module)
        except ERRORS as error:
            return f"the sharded model fails ({_first_line(error)})"
    return ""


def _compute(model: torch.nn.Module) -> None:
    # With a mask of pairs transformers does not look at the values of masks and positions, of which the meta device has none.
    tokens = torch.zeros((1, 8), dtype=torch.long, device="meta")
    mask = torch.zeros((1, 1, 8, 8), dtype=torch.bfloat16, device="meta")
    with torch.no_grad():
        model.to(torch.bfloat16)(input_ids=tokens, attention_mask=mask, use_cache=False)


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"


def summary(outcomes: dict[str, str]) -> str:
    """The counts in a sentence."""
    unmade = sum(each.startswith("not made") for each in outcomes.values())
    cut = sum(each == CUT for each in outcomes.values())
    refused = len(outcomes) - cut - unmade
    return f"{cut} of {len(outcomes)} are sharded, {refused} refused, {unmade} not made"


def table(outcomes: dict[str, str]) -> str:
    """The counts, and a row for each architecture that is not sharded."""
    rows = [(f"`{name}`", why.replace("|", "/").replace("<", "&lt;")) for name, why in outcomes.items() if why != CUT]
    return (
        f"# Architectures with a tensor-parallel plan\n\n`python bench/tp_plans.py --write bench/results/tp-plans.md`, "
        f"transformers {transformers.__version__}, two ranks, default sizes: {summary(outcomes)}.\n\n"
        f"{markdown(('architecture', 'reason'), rows)}\n"
    )


def planned(name: str) -> bool:
    """True for an architecture that has a plan."""
    return bool(getattr(CONFIG_MAPPING[name], "base_model_tp_plan", None))


def made(kind: type) -> torch.nn.Module:
    """Builds a model on the meta device. A configuration without an automatic class is resolved by its module."""
    config = kind()
    with torch.device("meta"):
        for automatic in (AutoModelForCausalLM, AutoModel):
            with suppress(ValueError):  # for a class that transformers lists and does not have
                if type(config) in automatic._model_mapping:
                    return automatic.from_config(config)
        return _class_of(kind)(config)


def _class_of(kind: type) -> type:
    """The model class of a configuration: of those of its module that take it, one named as a model, or any."""
    module = importlib.import_module(kind.__module__.replace("configuration_", "modeling_"))
    takers = [
        each
        for each in vars(module).values()
        if inspect.isclass(each) and issubclass(each, PreTrainedModel) and not each.__name__.endswith("PreTrainedModel")
        if each.__module__ == module.__name__ and _takes(each) in (kind, kind.__name__)
    ]
    named = [each for each in takers if each.__name__.endswith("Model")]
    if not takers:
        raise ValueError(f"no model of {kind.__name__} is known")
    return (named or takers)[0]


def _takes(model: type) -> Any:
    """The type, or its name, of the configuration that a model's constructor names; else that of the class."""
    found = inspect.signature(model).parameters.get("config")
    named = found is not None and found.annotation is not inspect.Parameter.empty
    return found.annotation if found is not None and named else getattr(model, "config_class", None)


if __name__ == "__main__":
    sys.exit(main())
