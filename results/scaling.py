"""Throughput over the number of devices: measurements, predictions, and their tables and plots."""

import csv
import io
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..knobs.text import config_text
from .columns import cell

COLUMNS = (
    "devices",
    "global_batch",
    "throughput",
    "unit",
    "speed_up",
    "efficiency",
    "peak_memory_mib",
    "default_throughput",
    "trainer_throughput",
    "predicted_throughput",
    "predicted_low",
    "predicted_high",
    "predicted_efficiency",
    "config",
    "why",
)
"""Columns of scale.csv: `ScalePoint`'s fields, and speed-up and efficiency relative to the smallest number of devices."""


@dataclass(frozen=True, kw_only=True)
class ScalePoint:
    """The results for one number of devices."""

    devices: int
    global_batch: int | None = None
    """Samples per optimizer step."""
    unit: str = ""
    """Unit of all throughputs."""
    throughput: float | None = None
    """Throughput of the winner over all devices; None if none was measured."""
    peak_memory_mib: float | None = None
    """Peak memory of the winner's fullest rank, MiB."""
    default_throughput: float | None = None
    """Throughput of the default configuration, which a trainer runs without tuning."""
    trainer_throughput: float | None = None
    """Throughput of `transformers.Trainer`, if it is the baseline: predicted where the winner is not measured."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Configuration of the winner, or the predicted one if none was measured."""
    predicted_throughput: float | None = None
    """Throughput of the best configuration by the estimate, corrected by measurements."""
    predicted_low: float | None = None
    """Lower end of its 80 % interval."""
    predicted_high: float | None = None
    """Upper end of its 80 % interval."""
    why: str = ""
    """Why nothing was found; empty if a winner was found or nothing was tried."""


@dataclass(frozen=True, kw_only=True)
class Scaling:
    """The result of `redline.scale`."""

    points: tuple[ScalePoint, ...]
    """By number of devices, the fewest first."""
    weak: bool = False
    """True if the global batch grows with the devices."""
    interrupted: bool = False
    """True if it was interrupted."""
    notes: tuple[str, ...] = ()
    """Notes for the user."""

    @property
    def measured(self) -> tuple[ScalePoint, ...]:
        """The points with a measured winner."""
        return tuple(each for each in self.points if each.throughput is not None)

    def speed_up(self, point: ScalePoint) -> float | None:
        """Returns the throughput over that of the fewest devices; None if either was not measured."""
        base = next(iter(self.measured), None)
        if base is None or point.throughput is None or not base.throughput:
            return None
        return point.throughput / base.throughput

    def efficiency(self, point: ScalePoint) -> float | None:
        """Returns the speed-up over the growth in devices; 1 if every device adds as much as the first ones."""
        gain = self.speed_up(point)
        return None if gain is None else gain * self.measured[0].devices / point.devices

    def predicted_efficiency(self, point: ScalePoint) -> float | None:
        """Returns the efficiency of the predictions, relative to the fewest measured devices if there are any."""
        known = [each for each in self.points if each.predicted_throughput]
        base = next((each for each in known if each in self.measured[:1]), next(iter(known), None))
        if base is None or point.predicted_throughput is None:
            return None
        assert base.predicted_throughput is not None
        return point.predicted_throughput / base.predicted_throughput * base.devices / point.devices

    def rows(self) -> list[dict[str, Any]]:
        """Returns one row per point, with `COLUMNS`."""
        computed = {
            "speed_up": self.speed_up,
            "efficiency": self.efficiency,
            "predicted_efficiency": self.predicted_efficiency,
        }
        return [
            {name: computed[name](each) if name in computed else getattr(each, name) for name in COLUMNS}
            for each in self.points
        ]

    def to_dict(self) -> dict[str, Any]:
        """Returns a JSON-ready summary."""
        rows = [{**row, "config": dict(row["config"])} for row in self.rows()]
        return {"weak": self.weak, "interrupted": self.interrupted, "notes": list(self.notes), "points": rows}

    def csv(self) -> str:
        """Returns the text of scale.csv. Configurations are written as `knob=value` pairs."""
        file = io.StringIO()
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for row in self.rows():
            row["config"] = config_text(row["config"])
            writer.writerow([cell(row[name]) for name in COLUMNS])
        return file.getvalue()

    def svg(self) -> str:
        """Returns the text of scale.svg: throughput, efficiency and memory over devices."""
        return drawing(self)


_WIDTH, _HEIGHT, _LEFT, _BELOW, _ABOVE = 320, 240, 58, 34, 26
_OWN, _OTHER, _FAINT = "#2a9d5c", "#8a8f98", "#2a9d5c33"
Line = Sequence[tuple[float, float]]


def drawing(scaling: Scaling) -> str:
    """Draws three plots side by side, with devices on a logarithmic scale."""
    points = scaling.points
    speeds = [(each.devices, each.throughput) for each in points if each.throughput]
    plain = [(each.devices, each.default_throughput) for each in points if each.default_throughput]
    predictions = [(each.devices, each.predicted_throughput) for each in points if each.predicted_throughput]
    low = [(each.devices, each.predicted_low) for each in points if each.predicted_low]
    high = [(each.devices, each.predicted_high) for each in points if each.predicted_high]
    base = (speeds or predictions)[:1]
    ideal = [(each.devices, base[0][1] * each.devices / base[0][0]) for each in points] if base else []
    efficiency = [(p.devices, 100 * share) for p in points if (share := scaling.efficiency(p)) is not None]
    expected = [(p.devices, 100 * share) for p in points if (share := scaling.predicted_efficiency(p)) is not None]
    memory = [(each.devices, each.peak_memory_mib / 1024) for each in points if each.peak_memory_mib]
    unit = next((each.unit for each in points if each.unit), "")
    counts = [each.devices for each in points]
    band = [*low, *reversed(high)]
    panels = (
        _panel(
            0,
            f"throughput, {unit}",
            counts,
            ideal=ideal,
            band=band,
            dashed=predictions,
            faint=plain,
            line=speeds,
            log=True,
        ),
        _panel(1, "efficiency, %", counts, dashed=expected, line=efficiency),
        _panel(2, "peak memory of a device, GiB", counts, line=memory),
    )
    legend = (
        "green: the winner; grey: the default configuration; dashed: predicted, with its 80 % interval; dotted: ideal"
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {3 * _WIDTH} {_HEIGHT + 18}" font-family="sans-serif" '
        f'font-size="10" fill="#555"><rect width="100%" height="100%" fill="#fff"/>{"".join(panels)}'
        f'<text x="{_LEFT}" y="{_HEIGHT + 10}">{legend}</text></svg>\n'
    )


def _panel(
    place: int,
    title: str,
    counts: Sequence[int],
    *,
    line: Line,
    dashed: Line = (),
    faint: Line = (),
    ideal: Line = (),
    band: Line = (),
    log: bool = False,
) -> str:
    """Draws one plot: lines of (devices, value) with common axes."""
    values = [value for each in (line, dashed, faint, band) for _, value in each]
    head = f'<text x="{place * _WIDTH + _LEFT}" y="16" font-size="11" fill="#222">{title}</text>'
    if not values:
        return head
    least, most = (min(values) / 1.5, max(values) * 1.2) if log else (0.0, max(values) * 1.1)

    def x(devices: float) -> float:
        first, last = math.log2(counts[0]), math.log2(counts[-1])
        share = (math.log2(devices) - first) / (last - first) if last > first else 0.5
        return place * _WIDTH + _LEFT + share * (_WIDTH - _LEFT - 16)

    def y(value: float) -> float:
        if log:
            share = math.log(value / least) / math.log(most / least)
        else:
            share = (value - least) / (most - least)
        return _HEIGHT - _BELOW - share * (_HEIGHT - _BELOW - _ABOVE)

    def path(each: Line) -> str:
        return " ".join(f"{x(devices):.1f},{y(value):.1f}" for devices, value in each)

    out = [head]
    marks = sorted({counts[round(i * (len(counts) - 1) / 5)] for i in range(6)})
    foot = _HEIGHT - _BELOW
    out += [f'<text x="{x(each):.1f}" y="{foot + 14}" text-anchor="middle">{each:,}</text>' for each in marks]
    for value in _ticks(least, most, log):
        left, right, at = place * _WIDTH + _LEFT, (place + 1) * _WIDTH - 16, y(value)
        out.append(f'<path d="M{left} {at:.1f}H{right}" stroke="#eee"/>')
        out.append(f'<text x="{left - 6}" y="{at + 3:.1f}" text-anchor="end">{_short(value)}</text>')
    if band:
        out.append(f'<polygon points="{path(band)}" fill="{_FAINT}"/>')
    inside = [(devices, value) for devices, value in ideal if least <= value <= most]
    for each, style in (
        (inside, f'stroke="{_OTHER}" stroke-dasharray="1 4"'),
        (dashed, f'stroke="{_OWN}" stroke-dasharray="5 4"'),
        (faint, f'stroke="{_OTHER}"'),
        (line, f'stroke="{_OWN}" stroke-width="2"'),
    ):
        out.append(f'<polyline points="{path(each)}" fill="none" {style}/>' if len(each) > 1 else "")
    out += [f'<circle cx="{x(d):.1f}" cy="{y(v):.1f}" r="3" fill="{_OTHER}"/>' for d, v in faint]
    out += [f'<circle cx="{x(d):.1f}" cy="{y(v):.1f}" r="3.5" fill="{_OWN}"/>' for d, v in line]
    return "".join(out)


def _ticks(least: float, most: float, log: bool) -> list[float]:
    """Returns about five round numbers within a range."""
    if not log:
        step = 10 ** math.floor(math.log10(most / 2))
        step = next(step * many for many in (1, 2, 5, 10, 20) if most / (step * many) <= 6)
        return [step * i for i in range(int(most / step) + 1)]
    powers = range(math.floor(math.log10(least)), math.ceil(math.log10(most)) + 1)
    many = (1, 2, 5) if len(powers) <= 3 else (1,)
    return [value for power in powers for each in many if least <= (value := each * 10.0**power) <= most]


def _short(value: float) -> str:
    for size, sign in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= size:
            return f"{value / (1e3 if sign == 'k' else size):.3g}{sign}"
    return f"{value:.3g}"
