"""Throughput over the number of devices: measurements, predictions, their table and their plot."""

import csv
import io
import math
from collections.abc import Iterable, Mapping
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
        return tuple(point for point in self.points if point.throughput is not None)

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
        predicted = [candidate for candidate in self.points if candidate.predicted_throughput]
        base = next(
            (candidate for candidate in predicted if candidate in self.measured[:1]), next(iter(predicted), None)
        )
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
            {name: computed[name](point) if name in computed else getattr(point, name) for name in COLUMNS}
            for point in self.points
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
        """Returns the text of scale.svg: throughput over devices, both logarithmic."""
        return _drawing(self)


_WIDTH, _HEIGHT, _LEFT, _RIGHT, _ABOVE, _BELOW = 520, 320, 64, 16, 30, 50
_OWN, _DEFAULT, _BAND = "#2a9d5c", "#8a8f98", "#2a9d5c33"


def _drawing(scaling: Scaling) -> str:
    points = scaling.points

    def line(name: str) -> list[tuple[int, float]]:
        values = ((point.devices, getattr(point, name)) for point in points)
        return [(devices, value) for devices, value in values if value]

    winners, predicted, default = line("throughput"), line("predicted_throughput"), line("default_throughput")
    band = [*line("predicted_low"), *reversed(line("predicted_high"))]
    drawn = [value for _, value in (*winners, *predicted, *default, *band)]
    unit = next((point.unit for point in points if point.unit), "")
    texts = [f'<text x="{_LEFT}" y="18" font-size="12" fill="#222">throughput, {unit}</text>']
    if not drawn:
        return _svg(texts)
    fewest, largest = points[0].devices, points[-1].devices
    least, most = min(drawn) / 1.5, max(drawn) * 1.5

    def x(devices: float) -> float:
        share = math.log(devices / fewest) / math.log(largest / fewest) if largest > fewest else 0.5
        return _LEFT + share * (_WIDTH - _LEFT - _RIGHT)

    def y(value: float) -> float:
        return _HEIGHT - _BELOW - math.log(value / least) / math.log(most / least) * (_HEIGHT - _ABOVE - _BELOW)

    def path(values: Iterable[tuple[float, float]]) -> str:
        return " ".join(f"{x(devices):.1f},{y(value):.1f}" for devices, value in values)

    foot = _HEIGHT - _BELOW + 14
    texts += [f'<text x="{x(p.devices):.1f}" y="{foot}" text-anchor="middle">{p.devices:,}</text>' for p in points]
    for power in range(math.ceil(math.log10(least)), math.floor(math.log10(most)) + 1):
        height = y(10.0**power)
        texts.append(f'<path d="M{_LEFT} {height:.1f}H{_WIDTH - _RIGHT}" stroke="#eee"/>')
        texts.append(f'<text x="{_LEFT - 6}" y="{height + 3:.1f}" text-anchor="end">{10**power:,.6g}</text>')
    start, speed = (winners or predicted or default)[0]
    end = min(largest, start * most / speed)
    shapes = [f'<polygon points="{path(band)}" fill="{_BAND}"/>'] if band else []
    for values, style in (
        ([(start, speed), (end, speed * end / start)], f'stroke="{_DEFAULT}" stroke-dasharray="1 4"'),
        (predicted, f'stroke="{_OWN}" stroke-dasharray="5 4"'),
        (default, f'stroke="{_DEFAULT}"'),
        (winners, f'stroke="{_OWN}" stroke-width="2"'),
    ):
        shapes.append(f'<polyline points="{path(values)}" fill="none" {style}/>')
    for values, colour in ((default, _DEFAULT), (winners, _OWN)):
        shapes += [f'<circle cx="{x(devices):.1f}" cy="{y(v):.1f}" r="3" fill="{colour}"/>' for devices, v in values]
    return _svg([*texts, *shapes])


def _svg(elements: Iterable[str]) -> str:
    legend = "green: the winner; grey: the default; dashed: predicted, with its 80 % interval; dotted: proportional"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {_HEIGHT}" font-family="sans-serif" '
        f'font-size="10" fill="#555"><rect width="100%" height="100%" fill="#fff"/>{"".join(elements)}'
        f'<text x="{_WIDTH / 2}" y="{_HEIGHT - 20}" text-anchor="middle">devices</text>'
        f'<text x="8" y="{_HEIGHT - 6}" font-size="9">{legend}</text></svg>\n'
    )
