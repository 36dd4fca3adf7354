"""What `redline estimate` says, as text."""

import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..knobs.lossy import exactness
from ..knobs.strategy import STANDARD

if TYPE_CHECKING:
    from ..estimator.document import EstimateDocument
    from ..estimator.survey import Ranked


def render(document: "EstimateDocument", *, explain: bool = False, width: int = 100) -> str:
    """An estimate as text in lines of that width; with `explain` every configuration's memory and time by the term."""
    lines = _head(document)
    ranked = document.ranked
    if not ranked:
        lines += ["", "no configuration is predicted to fit"]
        if document.reference is not None:
            need = document.reference.estimate.peak_memory_mib / 1024
            limit = document.request.estimator.memory_limit_mib / 1024
            lines.append(f"the least memory, {need:.1f} GiB of the {limit:.1f} GiB there are, takes")
            lines.append(f"  {_config(document.reference)}")
            ranked = (document.reference,)
    else:
        lines += ["", *_table(document, width)]
        if document.survey is not None:
            lines += _next(document)
        if ranked[0].lossy and document.survey is not None:
            lines += ["", _exact(document.survey.best_exact, ranked[0])]
    if explain:
        for each in ranked:
            lines += ["", *_explained(each)]
    if document.survey is not None and document.survey.out:
        lines += ["", f"ruled out, of {document.survey.predicted:,} predicted configurations"]
        lines += [f"  {count:>9,}  {reason}" for reason, count in document.survey.out.items()]
    if document.layerwise is not None:
        lines += ["", *document.layerwise.lines()]
    for note in (*document.request.notes, *document.facts.notes):
        lines += ["", f"note: {note}"]
    return "\n".join(lines)


def _head(document: "EstimateDocument") -> list[str]:
    request, setup = document.request, document.request.estimator.training
    sizes = [f"{document.facts.parameters:,} parameters"]
    if setup.seq_len:
        sizes.append(f"sequences of {setup.seq_len} tokens")
    if request.global_batch:
        sizes.append(f"global batch {request.global_batch}")
    machine = request.hardware
    lines = [
        f"{request.name} on {request.devices} x {machine.name}: {', '.join(sizes)}",
    ]
    if document.survey is not None:
        found = document.survey
        drawn = f", drawn from {found.valid:,} valid ones," if found.predicted < found.valid else ""
        lines.append(f"{found.fitting:,} of {found.predicted:,} configurations{drawn} are predicted to fit")
    if document.learned_from:
        lines.append(f"corrected by {document.learned_from} measured trials")
    return lines


def _table(document: "EstimateDocument", width: int) -> list[str]:
    """A row of figures for each configuration, and the configuration below it, in lines of that width."""
    devices = document.request.devices
    unit = document.ranked[0].estimate.unit
    rows = [("", unit, "a device", "+-", "step", "MFU", "memory", "fits", "bound by")]
    shown = [(str(number), each) for number, each in enumerate(document.ranked, 1)]
    if document.baseline is not None:
        shown.append(("untuned", document.baseline))
    for name, each in shown:
        estimate = each.estimate
        spread = 100 * (estimate.step_ms_high / estimate.step_ms - 1)
        rows.append(
            (
                name,
                f"{estimate.throughput:,.0f}",
                f"{estimate.throughput / devices:,.0f}",
                f"{spread:.0f} %",
                _time(estimate.step_ms),
                f"{100 * estimate.mfu:.1f} %",
                f"{estimate.peak_memory_mib / 1024:.1f} GiB",
                f"{100 * estimate.probability_fits:.0f} %" if estimate.fits is not None else "",
                estimate.binds,
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    last = len(widths) - 1
    lines = []
    for row, below in zip(rows, (None, *(each for _, each in shown))):
        cells = (
            cell.rjust(size) if 0 < at < last else cell.ljust(size) for at, (cell, size) in enumerate(zip(row, widths))
        )
        lines.append("  ".join(cells).rstrip())
        if below is not None:
            indent = " " * (widths[0] + 2)
            lines += textwrap.wrap(
                _config(below), width, initial_indent=indent, subsequent_indent=indent, break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
    return lines


def _next(document: "EstimateDocument") -> list[str]:
    """What the figures mean, and the command that measures the first."""
    best, base = document.ranked[0], document.baseline
    lines = ["", "plans differ in how they share the model; the first has the highest throughput times chance to fit;"]
    lines.append("+- covers 80 % of outcomes, fits is the chance that memory suffices")
    if base is not None and base.estimate.fits:
        ratio = best.estimate.throughput / base.estimate.throughput
        lines.append(f"the first is predicted to be {ratio:.2f}x as fast as what a person would run untuned")
    elif base is not None:
        lines.append("what a person would run untuned is not predicted to fit")
    return lines


def _exact(exact: "Ranked | None", best: "Ranked") -> str:
    """The best without lossy values, beside a best with some."""
    words = exactness(best.lossy)
    if exact is None:
        return f"{words}: none is predicted to fit"
    estimate = exact.estimate
    ratio = estimate.throughput / best.estimate.throughput
    return (
        f"{words}: {estimate.throughput:,.0f} {estimate.unit}, {ratio:.2f} times the best, "
        f"{estimate.peak_memory_mib / 1024:.1f} GiB, {_config(exact)}"
    )


def _config(ranked: "Ranked") -> str:
    # What stands in every table says the least.
    quiet = {name: each.neutral for name, each in STANDARD.items() if name not in ("micro_batch", "grad_accum", "dp")}
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}{' (lossy)' if name in ranked.lossy else ''}"
        for name, value in ranked.config.items()
        if not (name in quiet and value == quiet[name])
    )


def _time(milliseconds: float) -> str:
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e4 else f"{milliseconds:,.1f} ms"


def _explained(ranked: "Ranked") -> list[str]:
    estimate = ranked.estimate
    lines = [_config(ranked)]
    for what, prefix, total, unit, scale in (
        ("memory of the fullest rank", "memory.", estimate.peak_memory_mib, "GiB", 1024.0),
        ("time of a step", "time.", estimate.step_ms, "ms", 1.0),
    ):
        low, high = (
            (estimate.memory_low, estimate.memory_high) if scale > 1 else (estimate.step_ms_low, estimate.step_ms_high)
        )
        lines.append(
            f"  {what}: {total / scale:,.2f} {unit}, 80 % within {low / scale:,.2f} to {high / scale:,.2f} {unit}"
        )
        lines += _terms(estimate.breakdown, prefix, unit, scale, total)
    return lines


def _terms(breakdown: Mapping[str, float], prefix: str, unit: str, scale: float, total: float) -> list[str]:
    terms = {name.removeprefix(prefix): value for name, value in breakdown.items() if name.startswith(prefix)}
    shown = sorted((item for item in terms.items() if item[1] > 0.0005 * total), key=lambda item: -item[1])
    return [f"    {value / scale:>10,.2f} {unit}  {100 * value / total:>4.0f} %  {name}" for name, value in shown]
