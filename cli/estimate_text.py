"""The output of `redline estimate`."""

import textwrap
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ..knobs.lossy import exactness
from ..knobs.strategy import STANDARD
from ..knobs.text import config_text

if TYPE_CHECKING:
    from ..estimator.document import EstimateDocument
    from ..estimator.estimate import Estimate
    from ..estimator.plans import Change
    from ..estimator.survey import Ranked, Survey


def head(document: "EstimateDocument", width: int = 100) -> list[str]:
    """Returns the request and the main result: the chance to fit, the speed, and the gain over untuned."""
    request, setup = document.request, document.request.estimator.training
    sizes = [f"{_count(document.facts.parameters)} parameters"]
    workload = request.trains.get("workload") or {}
    if sample := workload.get("sample") or (f"sequences of {setup.seq_len:,} tokens" if setup.seq_len else ""):
        sizes.append(sample)
    if request.global_batch:
        sizes.append(f"global batch {request.global_batch:,}")
    by = "" if request.framework.name == "redline" else f" by {request.framework.name}"
    class_name = workload.get("class")
    by = f" ({class_name})" + by if class_name else by
    title = f"{request.name}{by} on {request.devices} x {request.hardware.name}: {', '.join(sizes)}"
    lines = _wrapped(title, "", width)
    if document.survey is not None and document.ranked:
        best, base = document.ranked[0].estimate, document.baseline
        verdict = f"predicted: {best.throughput:,.0f} {best.unit}"
        if base is not None and base.estimate.fits:
            verdict += f", {best.throughput / base.estimate.throughput:.2f}x untuned"
        elif base is not None:
            verdict += ", where untuned does not fit"
        verdict += f"; fits with a chance of {100 * best.probability_fits:.0f} %"
        unmeasured = request.hardware.unmeasured
        lines += [verdict] if unmeasured is None else _wrapped(f"{verdict}; {unmeasured}", "", width)
    return lines


def body(
    document: "EstimateDocument",
    *,
    explain: bool = False,
    width: int = 100,
    then: Sequence[str] = (),
    advice: "Sequence[Change]" = (),
) -> list[str]:
    """Returns the plans, the assumptions and the next commands, wrapped to `width`.

    Args:
        document: the estimate.
        explain: True adds the terms of memory and time of every configuration.
        width: columns.
        then: commands to run next.
        advice: changes that make something fit, if nothing does.
    """
    lines: list[str] = []
    ranked = document.ranked
    if not ranked:
        lines += ["", "no configuration is predicted to fit"]
        if document.reference is not None:
            need = document.reference.estimate.peak_memory_mib / 1024
            limit = document.request.estimator.memory_limit_mib / 1024
            lines.append(f"the configuration with the least memory, {need:.1f} GiB of {limit:.1f} GiB, is")
            lines += _wrapped(_config(document.reference.config, document.reference.lossy), "  ", width)
            ranked = (document.reference,)
        lines += ["", *_wrapped(_advice(advice), "", width), "", *_wrapped(_assumed(document), "", width)]
    else:
        lines += ["", *_table(document, width)]
        if ranked[0].lossy and document.survey is not None:
            lines += ["", *_wrapped(_exact(document.survey.best_exact, ranked[0]), "", width)]
    if explain:
        for ranked_plan in ranked:
            lines += ["", *_explained(ranked_plan)]
            if ranked_plan is ranked[0]:
                lines += _wrapped(f"fullest rank: {document.fullest}", "  ", width)
    if document.survey is not None:
        lines += ["", *_survey_lines(document.survey, width)]
    if document.layerwise is not None:
        lines += ["", *document.layerwise.lines()]
    if ranked is document.ranked and document.request.framework.name != "redline":
        lines += ["", *_wrapped(_assumed(document), "", width)]
    for note in (*document.request.notes, *document.facts.notes):
        lines += ["", *_wrapped(f"note: {note}", "", width)]
    if then and document.ranked:
        lines += ["", *(f"{'next' if not index else '':<9}{command}" for index, command in enumerate(then))]
    return lines


def _advice(changes: "Sequence[Change]") -> str:
    """Returns a sentence with the changes that make something fit."""
    if not changes:
        return "Predicted as well, and too large: shorter sequences, adapters, lossy values and more devices."
    return f"This fits, each by itself: {', '.join(map(str, changes))}."


def _assumed(document: "EstimateDocument") -> str:
    """Returns a sentence with the facts of the trainer that the predicted memory depends on."""
    return f"assumed of {document.request.framework.name}: {'; '.join(document.request.framework.facts)}"


def _survey_lines(survey: "Survey", width: int) -> list[str]:
    """Returns the number of predicted configurations, and the share of them that fits."""
    share = 100 * survey.fitting / max(1, survey.predicted)
    sampled = ""
    if survey.valid is None:
        sampled = ", drawn from more than can be counted,"
    elif survey.predicted < survey.valid:
        sampled = f", drawn from {survey.valid:,} valid ones,"
    return _wrapped(f"{share:.0f} % of {survey.predicted:,} configurations{sampled} are predicted to fit", "", width)


def _table(document: "EstimateDocument", width: int) -> list[str]:
    """Returns a row of figures for each plan with its configuration below it."""
    best, base = document.ranked[0], document.baseline
    rows = [(plan.role, plan.ranked) for plan in document.plans] or [("", best)]
    common = _common([ranked.config for _, ranked in rows]) if len(rows) > 1 else {}
    if base is not None:
        rows.append(("untuned", base))
    devices = document.request.devices
    device = "GPU" if document.request.hardware.kind != "cpu" else "device"
    columns: dict[str, list[str]] = {"": [], best.estimate.unit: [], f"per {device}": [], "80 % range": [], "step": []}
    columns |= {"MFU": [], "memory": [], "fits": [], "bound by": []}
    for role, ranked in rows:
        estimate = ranked.estimate
        cells = (
            role,
            f"{estimate.throughput:,.0f}",
            f"{estimate.throughput / devices:,.0f}",
            _speeds(estimate),
            step_time(estimate.step_ms),
            f"{100 * estimate.mfu:.0f} %",
            f"{estimate.peak_memory_mib / 1024:.1f} GiB",
            f"{100 * estimate.probability_fits:.0f} %" if estimate.fits is not None else "",
            estimate.binds,
        )
        for cell, column in zip(cells, columns.values(), strict=True):
            column.append(cell)
    if devices == 1:
        del columns[f"per {device}"]
    for least in ("bound by", "MFU", "step"):  # left out in a narrow terminal
        if _width(columns) > width:
            del columns[least]
    indent = " " * (2 + max(map(len, columns[""])))
    lines = [_row(list(columns), columns)]
    for index, (_, ranked) in enumerate(rows):
        lines.append(_row([column[index] for column in columns.values()], columns))
        if ranked is base or not common:
            knobs: Mapping[str, Any] = ranked.config
        else:
            knobs = {name: value for name, value in ranked.config.items() if common.get(name, common) != value}
        lines += _wrapped(_config(knobs, ranked.lossy), indent, width)
    if common:
        lines += ["", *_wrapped(f"in all plans but untuned: {_config(common, best.lossy)}", "", width)]
    return [*lines, "", *_legend(document, width)] if document.survey is not None else lines


def _legend(document: "EstimateDocument", width: int) -> list[str]:
    """Returns explanations of the rows and columns."""
    roles = {plan.role for plan in document.plans}
    sentences = []
    if "safest" in roles:
        sentences.append("safest: the most certain to fit within 3 % of the fastest.")
    if "least memory" in roles:
        sentences.append("least memory: at least half as fast.")
    sentences.append("untuned: the default configuration, or the usual manual changes that make it fit.")
    sentences.append("80 % range: 8 of 10 measurements are expected in it; fits: the chance that it fits in memory.")
    return _wrapped(" ".join(sentences), "", width)


def _common(configs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns the knobs that have the same value in all of them."""
    absent = object()
    return {
        name: value
        for name, value in configs[0].items()
        if all(config.get(name, absent) == value for config in configs[1:])
    }


def _width(columns: Mapping[str, Sequence[str]]) -> int:
    return sum(max(map(len, (name, *cells))) for name, cells in columns.items()) + 2 * (len(columns) - 1)


def _row(cells: Sequence[str], columns: Mapping[str, Sequence[str]]) -> str:
    """Returns cells padded to their columns; texts are left-aligned, figures right-aligned."""
    padded = []
    for cell, (name, column) in zip(cells, columns.items(), strict=True):
        size = max(map(len, (name, *column)))
        padded.append(cell.ljust(size) if name in ("", "bound by") else cell.rjust(size))
    return "  ".join(padded).rstrip()


def _wrapped(paragraph: str, indent: str, width: int) -> list[str]:
    return textwrap.wrap(
        paragraph,
        width,
        initial_indent=indent,
        subsequent_indent=indent,
        break_long_words=False,
        break_on_hyphens=False,
    )


def _count(number: int) -> str:
    """Returns a number of parameters with three digits.

    >>> _count(8_030_261_248), _count(124_439_808), _count(68)
    ('8.03 billion', '124 million', '68')
    """
    for size, name in ((1e9, "billion"), (1e6, "million")):
        if number >= size:
            return f"{number / size:.3g} {name}" if number < 1000 * size else f"{number / size:,.0f} {name}"
    return f"{number:,}"


def _speeds(estimate: "Estimate") -> str:
    """Returns the 80 % range of the throughput."""
    samples = estimate.throughput * estimate.step_ms
    return range_text(samples / estimate.step_ms_high, samples / estimate.step_ms_low)


def range_text(low: float, high: float) -> str:
    """Returns both ends of a range, with three digits of the upper one.

    >>> range_text(67_923.4, 108_923.4), range_text(5_801.2, 9_123.0), range_text(81.26, 99.0)
    ('68k-109k', '5,800-9,120', '81.3-99')
    """
    if high >= 1e5:
        return f"{low / 1e3:,.0f}k-{high / 1e3:,.0f}k"
    if high >= 1000:
        return f"{round(low, -1):,.0f}-{round(high, -1):,.0f}"
    return f"{low:.3g}-{high:.3g}"


def _exact(exact: "Ranked | None", best: "Ranked") -> str:
    """Returns the best configuration without lossy values, compared with a lossy best one."""
    label = exactness(best.lossy)
    if exact is None:
        return f"{label}: none is predicted to fit"
    estimate = exact.estimate
    ratio = estimate.throughput / best.estimate.throughput
    return (
        f"{label}: {estimate.throughput:,.0f} {estimate.unit}, {ratio:.2f} times the best, "
        f"{estimate.peak_memory_mib / 1024:.1f} GiB, {_config(exact.config, exact.lossy)}"
    )


def _config(config: Mapping[str, Any], lossy: Collection[str] = ()) -> str:
    """Returns knobs and values, without those at the value that a configuration without the knob has."""
    quiet = {name: knob.neutral for name, knob in STANDARD.items() if name not in ("micro_batch", "grad_accum", "dp")}
    knobs = {name: value for name, value in config.items() if not (name in quiet and value == quiet[name])}
    return config_text(knobs, lossy)


def step_time(milliseconds: float) -> str:
    """Returns the time of a step.

    >>> step_time(1389.46), step_time(32_351.0)
    ('1,389.5 ms', '32.35 s')
    """
    return f"{milliseconds / 1e3:.2f} s" if milliseconds >= 1e4 else f"{milliseconds:,.1f} ms"


def _explained(ranked: "Ranked") -> list[str]:
    estimate = ranked.estimate
    lines = [_config(ranked.config, ranked.lossy)]
    for quantity, prefix, total, unit, scale in (
        ("memory of the fullest rank", "memory.", estimate.peak_memory_mib, "GiB", 1024.0),
        ("time of a step", "time.", estimate.step_ms, "ms", 1.0),
    ):
        low, high = (
            (estimate.memory_low, estimate.memory_high) if scale > 1 else (estimate.step_ms_low, estimate.step_ms_high)
        )
        lines.append(
            f"  {quantity}: {total / scale:,.2f} {unit}, 80 % within {low / scale:,.2f} to {high / scale:,.2f} {unit}"
        )
        lines += _terms(estimate.breakdown, prefix, unit, scale, total)
    return lines


def _terms(breakdown: Mapping[str, float], prefix: str, unit: str, scale: float, total: float) -> list[str]:
    terms = {name.removeprefix(prefix): value for name, value in breakdown.items() if name.startswith(prefix)}
    largest = sorted((item for item in terms.items() if item[1] > 0.0005 * total), key=lambda item: -item[1])
    return [f"    {value / scale:>10,.2f} {unit}  {100 * value / total:>4.0f} %  {name}" for name, value in largest]
