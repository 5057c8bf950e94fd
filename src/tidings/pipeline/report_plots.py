"""
Plots as SVG text: lines, bars and a heat map, from plain numbers.

Each plot is one ``<svg>`` that scales with its place, carries its own title and description for those who cannot see it, and says
so where there is nothing to draw. Colours come from the page's style sheet, so that one plot serves light, dark and paper. The
same numbers give the same text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from typing import Final, NamedTuple

__all__ = ["Bar", "Line", "bar_plot", "heat_map", "human", "line_plot", "nice_ceiling"]

_WIDTH: Final = 480
_HEIGHT: Final = 240
_LEFT: Final = 54
_RIGHT: Final = 12
_TOP: Final = 14
_BOTTOM: Final = 34
_STEPS: Final = 4
_COLOURS: Final = 7
_BARS_MAX: Final = 20
_LABEL_CHARS_MAX: Final = 60
_ROW: Final = 34


class Line(NamedTuple):
    """One line of a plot; a gap where a value is missing."""

    name: str
    values: Sequence[float | None]


class Bar(NamedTuple):
    """One bar, and a class for its colour: ``good``, ``warn``, ``bad`` or nothing."""

    name: str
    value: float
    kind: str = ""


def human(value: float) -> str:
    """A number in few characters: 950, 1.2k, 34M; small ones with as many digits as they need."""
    size = abs(value)
    for limit, unit in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if size >= limit:
            return f"{_short(value / limit)}{unit}"
    return _short(value)


def _short(value: float) -> str:
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    digits = 0 if abs(value) >= 100 else 1 if abs(value) >= 10 else 2 if abs(value) >= 0.1 else 4
    text = f"{value:.{digits}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def nice_ceiling(value: float) -> float:
    """The least of 1, 2, 2.5, 5 times a power of ten that is not below a value; 1 for nothing."""
    if not value > 0 or not math.isfinite(value):
        return 1.0
    power: float = 10.0 ** math.floor(math.log10(value))
    return next((step * power for step in (1, 2, 2.5, 5, 10) if step * power >= value * (1 - 1e-12)), 10 * power)


def line_plot(title: str, unit: str, lines: Sequence[Line], ticks: Sequence[str]) -> str:
    """
    Lines over time.

    Args:
        title: What is shown.
        unit: Of the values, for axis and tooltips.
        lines: Each with one value a tick.
        ticks: The times, as text; the first, the middle and the last are written below.
    """
    known = [value for line in lines for value in line.values if value is not None]
    if not known:
        return _nothing(title)
    top, bottom = nice_ceiling(max(known)), min(0.0, -nice_ceiling(-min(known)) if min(known) < 0 else 0.0)
    parts = [_grid(bottom, top, unit)]
    step = (_WIDTH - _LEFT - _RIGHT) / max(1, len(ticks) - 1)

    def place(at: int, value: float) -> tuple[float, float]:
        x = _LEFT + (at * step if len(ticks) > 1 else (_WIDTH - _LEFT - _RIGHT) / 2)
        return x, _TOP + (top - value) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)

    for number, line in enumerate(lines):
        path, dots, is_down = [], [], False
        for at, value in enumerate(line.values):
            if value is None:
                is_down = False
                continue
            x, y = place(at, value)
            path.append(f"{'L' if is_down else 'M'}{x:.1f} {y:.1f}")
            if not is_down and (at + 1 >= len(line.values) or line.values[at + 1] is None):
                dots.append(f'<circle class="dot c{number % _COLOURS}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>')
            is_down = True
        said = f"{line.name}: up to {human(max((v for v in line.values if v is not None), default=0))} {unit}"
        parts.append(
            f'<path class="line c{number % _COLOURS}" d="{"".join(path)}"><title>{escape(said)}</title></path>'
        )
        parts += dots  # a lone value would draw nothing as a line
    parts += _time_labels(ticks)
    legend = "".join(
        f'<li><span class="key c{number % _COLOURS}"></span>{escape(line.name)}</li>'
        for number, line in enumerate(lines)
    )
    about = f"{title}: {len(lines)} lines over {len(ticks)} steps, at most {human(max(known))} {unit}"
    return _figure(title, about, "".join(parts)) + f'<ul class="legend">{legend}</ul>'


def bar_plot(title: str, unit: str, bars: Sequence[Bar]) -> str:
    """Bars from left to right, each below its name; at most twenty, and how many were left out."""
    if not bars:
        return _nothing(title)
    shown = list(bars)[:_BARS_MAX]
    top = nice_ceiling(max(bar.value for bar in shown))
    height = len(shown) * _ROW + 4
    parts = []
    for number, bar in enumerate(shown):
        y = number * _ROW
        # A bar that stands for something is seen, however short it is.
        width = max(2.0, bar.value / top * (_WIDTH - 60)) if bar.value > 0 else 0.0
        label = bar.name if len(bar.name) <= _LABEL_CHARS_MAX else bar.name[: _LABEL_CHARS_MAX - 1] + "…"
        parts.append(
            f"<g><title>{escape(bar.name)}: {human(bar.value)} {escape(unit)}</title>"
            f'<text x="0" y="{y + 13}">{escape(label)}</text>'
            f'<rect class="bar {escape(bar.kind)}" x="0" y="{y + 18}" width="{width:.1f}" height="11" rx="2"/>'
            f'<text x="{width + 5:.1f}" y="{y + 28}">{human(bar.value)}</text></g>'
        )
    rest = f'<p class="note">and {len(bars) - _BARS_MAX} more</p>' if len(bars) > _BARS_MAX else ""
    about = f"{title}: {len(bars)} bars, at most {human(top)} {unit}"
    return _figure(title, about, "".join(parts), height) + rest


def heat_map(
    title: str, unit: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float]]
) -> str:
    """Cells whose depth is their share of the deepest one; each tells its value when pointed at."""
    deepest = max((value for row in cells for value in row), default=0.0)
    if deepest <= 0:
        return _nothing(title)
    left, top = 40, 20
    width = (_WIDTH - left - 6) / len(columns)
    height = 24
    parts = []
    for at, name in enumerate(columns):
        if at % max(1, len(columns) // 8) == 0:
            parts.append(f'<text x="{left + at * width + width / 2:.1f}" y="14" class="middle">{escape(name)}</text>')
    for y, name in enumerate(rows):
        parts.append(f'<text x="{left - 6}" y="{top + y * height + 16}" class="end">{escape(name)}</text>')
        for x, value in enumerate(cells[y]):
            said = f"{name} {columns[x]}: {human(value)} {unit}"
            parts.append(
                f'<rect class="cell" x="{left + x * width:.1f}" y="{top + y * height}" width="{width - 1:.1f}"'
                f' height="{height - 1}" fill-opacity="{0.06 + 0.94 * value / deepest:.3f}"><title>{escape(said)}</title></rect>'
            )
    about = f"{title}: {len(rows)} by {len(columns)} cells, the deepest {human(deepest)} {unit}"
    return _figure(title, about, "".join(parts), top + len(rows) * height + 4)


def _grid(bottom: float, top: float, unit: str) -> str:
    parts = []
    for number in range(_STEPS + 1):
        value = bottom + (top - bottom) * number / _STEPS
        y = _TOP + (top - value) / (top - bottom) * (_HEIGHT - _TOP - _BOTTOM)
        parts.append(f'<line class="grid" x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text x="{_LEFT - 6}" y="{y + 4:.1f}" class="end">{human(value)}</text>')
    parts.append(
        f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.1f}" y="{_HEIGHT - 2}" class="middle">{escape(unit)}</text>'
    )
    return "".join(parts)


def _time_labels(ticks: Sequence[str]) -> list[str]:
    y = _HEIGHT - _BOTTOM + 18
    if len(ticks) == 1:
        return [
            f'<text x="{_LEFT + (_WIDTH - _LEFT - _RIGHT) / 2:.1f}" y="{y}" class="middle">{escape(ticks[0])}</text>'
        ]
    places = [(0, _LEFT, ""), (len(ticks) - 1, _WIDTH - _RIGHT, "end")]
    return [f'<text x="{x}" y="{y}" class="{kind}">{escape(ticks[at])}</text>' for at, x, kind in places]


def _figure(title: str, about: str, content: str, height: int = _HEIGHT) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {height}" role="img" aria-label="{escape(title)}">'
        f"<title>{escape(title)}</title><desc>{escape(about)}</desc>{content}</svg>"
    )


def _nothing(title: str) -> str:
    return f'<p class="empty" role="img" aria-label="{escape(title)}">Nothing to show yet.</p>'
