"""How `redline estimate` shows its answer."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ...results.lossy import exactness

if TYPE_CHECKING:
    from ...estimator.answer import Answer
    from ...estimator.planning import Ranked


def render(answer: "Answer", *, explain: bool = False) -> str:
    """The answer as text; with `explain` every configuration's memory and time by the term."""
    lines = _head(answer)
    ranked = answer.ranked
    if not ranked:
        lines += ["", "no configuration is predicted to fit"]
        if answer.reference is not None:
            need = answer.reference.estimate.peak_memory_mib / 1024
            limit = answer.question.estimator.memory_limit_mib / 1024
            lines.append(f"the least memory, {need:.1f} GiB of the {limit:.1f} GiB there are, takes")
            lines.append(f"  {_config(answer.reference)}")
            ranked = (answer.reference,)
    else:
        lines += ["", *_table(answer)]
        if ranked[0].lossy and answer.plan is not None:
            lines += ["", _exact(answer.plan.best_exact, ranked[0])]
    if explain:
        for each in ranked:
            lines += ["", *_explained(each)]
    if answer.plan is not None and answer.plan.out:
        lines += ["", f"ruled out, of {answer.plan.predicted:,} predicted configurations"]
        lines += [f"  {count:>9,}  {reason}" for reason, count in answer.plan.out.items()]
    if answer.layerwise is not None:
        lines += ["", *answer.layerwise.lines()]
    for note in (*answer.question.notes, *answer.facts.notes):
        lines += ["", f"note: {note}"]
    return "\n".join(lines)


def _head(answer: "Answer") -> list[str]:
    question, setup = answer.question, answer.question.estimator.training
    sizes = [f"{answer.facts.parameters:,} parameters"]
    if setup.seq_len:
        sizes.append(f"sequences of {setup.seq_len} tokens")
    if question.global_batch:
        sizes.append(f"global batch {question.global_batch}")
    machine = question.hardware
    lines = [
        f"{question.name} on {question.devices} x {machine.name}: {', '.join(sizes)}",
    ]
    if answer.plan is not None:
        lines.append(
            f"{answer.plan.fitting:,} of {answer.plan.valid:,} valid configurations are predicted to fit"
        )
    if answer.learned_from:
        lines.append(f"corrected by {answer.learned_from} measured trials")
    return lines


def _table(answer: "Answer") -> list[str]:
    rows = [
        (
            "",
            answer.ranked[0].estimate.unit,
            "+-",
            "step",
            "MFU",
            "memory",
            "fits",
            "bound by",
            "configuration",
        )
    ]
    for number, each in enumerate(answer.ranked, 1):
        estimate = each.estimate
        spread = 100 * (estimate.step_ms_high / estimate.step_ms - 1)
        rows.append(
            (
                str(number),
                f"{estimate.throughput:,.0f}",
                f"{spread:.0f} %",
                _time(estimate.step_ms),
                f"{100 * estimate.mfu:.1f} %",
                f"{estimate.peak_memory_mib / 1024:.1f} GiB",
                f"{100 * estimate.probability_fits:.0f} %" if estimate.fits is not None else "",
                estimate.binds,
                _config(each),
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    right = {1, 2, 3, 4, 5, 6}
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


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
    quiet = {
        "sequence_parallel": False,
        "offload": "none",
        "fused_optimizer": True,
        "fusion": False,
        "zero": 0,
    }
    return " ".join(
        f"{name}={str(value).lower() if isinstance(value, bool) else value}"
        f"{' (lossy)' if name in ranked.lossy else ''}"
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
            (estimate.memory_low, estimate.memory_high)
            if scale > 1
            else (estimate.step_ms_low, estimate.step_ms_high)
        )
        lines.append(
            f"  {what}: {total / scale:,.2f} {unit}, 80 % within {low / scale:,.2f} to {high / scale:,.2f} {unit}"
        )
        lines += _terms(estimate.breakdown, prefix, unit, scale, total)
    return lines


def _terms(breakdown: Mapping[str, float], prefix: str, unit: str, scale: float, total: float) -> list[str]:
    terms = {name.removeprefix(prefix): value for name, value in breakdown.items() if name.startswith(prefix)}
    shown = sorted((item for item in terms.items() if item[1] > 0.0005 * total), key=lambda item: -item[1])
    return [
        f"    {value / scale:>10,.2f} {unit}  {100 * value / total:>4.0f} %  {name}" for name, value in shown
    ]
