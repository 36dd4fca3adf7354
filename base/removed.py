"""Names of earlier versions of redline, with their replacements."""

from collections.abc import Mapping

_SETTINGS = "write `{}: VALUE` into a YAML file, given by --settings FILE"
_COMMAND = "write `{}: VALUE` beside `command` into a YAML file, given by --command-file FILE"
_CONFIG = "write the model's sizes into a config.json and give its path as MODEL: docs/without-a-device.md shows one"
_SERVER = dict.fromkeys(
    ("--server", "--token", "--trust"), "`redline submit MODEL --wait` searches on a server's devices"
)
_METRIC_FILE = "print the numbers, or report them by `from redline import report`; --metric names those of the output"
_TRUST = "set the environment variable SSL_CERT_FILE to the file of certificates"
_TEAM = "searches are shown to all users of a server"
_HEADROOM = "5 % of a device's memory is kept free; for more, give a smaller memory limit"
_RANKS = "the ranks that decide are emulated, such as one of each pipeline stage"
_SCALE = {
    "--stop-on-error": "a number of devices without a result has the reason in its row, and the next one follows",
    "--strong": "leave it out: the global batch is constant without --weak",
}
_TRAIN = {
    **{
        f"--{name}": _SETTINGS.format(name.replace("-", "_"))
        for name in (
            *("lr-schedule", "lr-steps", "warmup", "min-lr", "decay", "weight-decay", "betas", "eps", "clip"),
            *("log-every", "eval-steps", "save-minutes", "keep", "field", "packing", "train-on"),
        )
    },
    "--no-shuffle": "write `shuffle: false` into a YAML file, given by --settings FILE",
    "--shuffle": "leave it out: samples are shuffled by default",
    **dict.fromkeys(
        ("--soak", "--no-soak"), "leave it out: a training that runs out of memory continues in a safer configuration"
    ),
    "--average": "save checkpoints by --save-every, and average those that `redline convert --step N` writes",
    "--tune-trials": "`redline tune` measures configurations, and --fix KNOB=V takes its winner's",
    "--skip-bad-rows": "leave bad rows out of the data, for example by the filter of datasets",
}
_TUNE = {
    **{
        f"--{name}": _COMMAND.format(name.replace("-", "_"))
        for name in ("render", "direction", "samples", "require", "shell", "no-observe")
    },
    "--metric-file": _METRIC_FILE,
    "--env": "write NAME=VALUE before the command's program, or `env` beside `command` into a --command-file",
    "--headroom": _HEADROOM,
    "--ranks": _RANKS,
    "--emulate": "write the framework's own mode into the command, such as --fake-process-group",
    "--soak": "leave it out: `redline train` continues in a safer configuration if memory runs out; other trainers need the "
    "free memory that --memory-limit leaves",
    "--emulate-first": "the estimate sets aside what cannot fit; `--runner emulate` measures memory on one device",
    "--memory-only": "--runner emulate predicts the time if --hardware is not this machine's, and measures memory alone",
    "--from": "write the knobs into --space FILE, or give them by --set KNOB=A,B,C",
    "--trace-memory": "`redline estimate --explain` shows the parts of the predicted memory, and "
    "torch.cuda.memory._record_memory_history() records the allocations of a run on a GPU",
}
_ESTIMATE = {
    **{
        f"--{name}": _CONFIG
        for name in (
            *("layers", "hidden", "heads", "kv-heads", "head-dim", "intermediate", "vocabulary"),
            *("gated", "not-gated", "tied", "positions"),
        )
    },
    "--trials-from": "`redline tune --warm-start RUN` learns from a run, and Estimator.calibrate in Python",
    "--data": "leave it out: an estimate does not depend on the data",
}
REPLACEMENTS: Mapping[str, Mapping[str, str]] = {
    "layout": {
        "megatron": "convert with --to hf; Megatron-Bridge imports that folder",
        "torchtitan": "convert with --to hf; torchtitan reads that folder with --checkpoint.initial_load_in_hf",
    },
    "argument": {
        "taken_from": "pass the knobs as space, or override={'tp': [1, 2], ...} for a model's own",
        "headroom": _HEADROOM,
        "ranks": _RANKS,
        "memory_only": "the runner 'emulate' predicts the time if the hardware is not this machine's, and measures memory alone",
    },
    "launcher": {"nemo": "use the launcher megatron-bridge, or {knob} placeholders in the command"},
    "runner": {
        "simulate": "`redline estimate -o plan.yaml` predicts, and `redline tune plan.yaml` measures its plans first",
        "slurm": "start Ray on the hosts of the allocation, as deploy/ray.sbatch does, and use the runner ray",
    },
    "command": {
        "compare": "`redline show RUN RUN...` compares runs",
        "logs": "`redline results ID -f` shows the events of a search, `--trial N` the output of a trial",
        "cancel": "`redline queue --cancel ID` ends a search",
        "worker": "`ray start --address HEAD:PORT` adds a host to the cluster of `redline serve --ray-address`",
        "user": "`redline token users`, `token change` and `token disable` do the same",
    },
    "option of tune": {**_TUNE, **_SERVER},
    "option of submit": {
        **_TUNE,
        "--reuse": "leave it out: a search learns from earlier ones of the same model",
        "--trust": _TRUST,
        "--visibility": "leave it out: searches are shown to all users of a server",
    },
    "option of serve": {
        "--no-worker": "give --ray-address, and the devices of that cluster are used in place of this host's",
        "--code-user": "start Ray as the user whose rights submitted code may have, and give --ray-address",
        "--no-workloads": "--no-code refuses all code",
        "--standby": "start the server again when it has ended, as deploy/redline.service does",
        "--rate": "limit requests by a proxy, as deploy/nginx.conf does",
        "--json-logs": "a proxy logs requests, and /metrics counts them",
        "--keep-events": "--keep-searches DAYS deletes searches with their events",
    },
    "option of queue": {
        "--workers": "`redline queue` shows the devices",
        "--hold": "`redline queue --cancel ID` ends a search, and --retry ID continues it",
        "--release": "`redline queue --retry ID` continues a search that was cancelled",
        "--show-to": "searches are shown to all users of a server",
        "--trust": _TRUST,
    },
    "option of results": {"--trust": _TRUST},
    "option of change": {"--team": _TEAM},
    "option of new": {
        "--team": _TEAM,
        "--allow-code": "--role code",
        "--running": "--searches N limits searches at once, --devices N devices",
    },
    "option of export": {"--launch": "the header of the file has the line that starts the training on each host"},
    "option of scale": {**_TUNE, **_SCALE},
    "option of doctor": {
        "--ranks": "all_reduce_perf of nccl-tests measures links, for `intra_node` of a hardware file"
    },
    "option of estimate": _ESTIMATE,
    "option of train": _TRAIN,
    "option of convert": {"--average": _TRAIN["--average"]},
}
"""Advice by kind and name."""


def replacement(kind: str, name: object) -> str | None:
    """Returns the error text for a name of an earlier version; None for any other name.

    >>> replacement("option of tune", "--from")
    '--from was removed: write the knobs into --space FILE, or give them by --set KNOB=A,B,C'
    """
    advice = REPLACEMENTS.get(kind, {}).get(str(name))
    return None if advice is None else f"{name} was removed: {advice}"
