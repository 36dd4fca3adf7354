"""Names of earlier versions of redline, with their replacements."""

_REPLACEMENTS = {
    ("layout", "megatron"): "convert with --to hf; Megatron-Bridge imports that folder",
    ("layout", "torchtitan"): "convert with --to hf; torchtitan reads that folder with --checkpoint.initial_load_in_hf",
    ("argument", "taken_from"): "pass the knobs as space, or override={'tp': [1, 2], ...} for a model's own",
    ("launcher", "nemo"): "use the launcher megatron-bridge, or {knob} placeholders in the command",
    (
        "runner",
        "simulate",
    ): "`redline estimate -o plan.yaml` predicts, and `redline tune plan.yaml` measures its plans first",
    ("runner", "slurm"): "start Ray on the hosts of the allocation, as deploy/ray.sbatch does, and use the runner ray",
    ("command", "compare"): "`redline show RUN RUN...` compares runs",
    ("command", "logs"): "`redline results ID -f` shows the events of a search, `--trial N` the output of a trial",
    ("command", "cancel"): "`redline queue --cancel ID` ends a search",
    (
        "option",
        "--stop-on-error",
    ): "a number of devices without a result has the reason in its row, and the next one follows",
    ("option", "--strong"): "leave it out: the global batch is constant without --weak",
    ("option", "--skip-bad-rows"): "leave bad rows out of the data, for example by the filter of datasets",
    ("option", "--from"): "write the knobs into --space FILE, or give them by --set KNOB=A,B,C",
    (
        "option",
        "--trace-memory",
    ): "`redline estimate --explain` shows the parts of the predicted memory, and "
    "torch.cuda.memory._record_memory_history() records the allocations of a run on a GPU",
}
"""By kind and name."""


def replacement(kind: str, name: object) -> str | None:
    """Returns the error text for a name of an earlier version; None for any other name.

    >>> replacement("option", "--from")
    '--from was removed: write the knobs into --space FILE, or give them by --set KNOB=A,B,C'
    """
    advice = _REPLACEMENTS.get((kind, str(name)))
    return None if advice is None else f"{name} was removed: {advice}"
