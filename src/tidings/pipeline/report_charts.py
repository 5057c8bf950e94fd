"""
The report's drawings: Vega-Lite says what they look like, ``vl-convert`` turns that into SVG, here and without a browser.

The page's style sheet gives the colours, by CSS variables, so a drawing follows light, dark and print. What a mark stands for
is told to screen readers and, when it is pointed at, to everybody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from datetime import datetime
from html import escape
from typing import Any, Final

from .units import short_duration, short_number

LINES_MAX: Final = 7
"""As many colours as the style sheet has for lines."""
_VEGA_LITE: Final = "6.4"
_WIDTH: Final = 480
_HEIGHT: Final = 200
_CELL_HEIGHT: Final = 24
_SPAN_FOR_LOG: Final = 100
"""Values of which the largest is so many times the smallest are drawn by their logarithm."""
_CONFIG: Final = {
    "font": "system-ui, sans-serif",
    "background": None,
    "view": {"stroke": None},
    "scale": {"bandPaddingInner": 0.06},
    "axis": {
        "labelColor": "var(--soft)",
        "labelFontSize": 12,
        "labelPadding": 6,
        "gridColor": "var(--rule)",
        "domain": False,
        "ticks": False,
        "title": None,
    },
}
_TIME_LABELS: Final = {"seconds": "%H:%M:%S", "minutes": "%H:%M", "hours": "%H:%M", "day": "%b %-d", "date": "%b %-d"}
_NUMBER_LABEL: Final = "datum.value < 1 ? format(datum.value, '~g') : replace(format(datum.value, '~s'), 'G', 'B')"
_NUMBER_TICKS: Final = tuple(10.0**power for power in range(-6, 16))
_DURATION_LABEL: Final = (
    "datum.value == 0 ? '0' : "
    + "".join(
        f"datum.value < {limit:g} ? format(datum.value / {length:g}, '~g') + ' {unit}' : "
        for limit, length, unit in (
            (1, 1e-3, "µs"),
            (1e3, 1, "ms"),
            (6e4, 1e3, "s"),
            (3.6e6, 6e4, "min"),
            (8.64e7, 3.6e6, "h"),
        )
    )
    + "format(datum.value / 8.64e7, '~g') + ' d'"
)
_DURATION_TICKS: Final = (1e-3, 1e-2, 1e-1, 1, 10, 100, 1e3, 1e4, 6e4, 6e5, 3.6e6, 3.6e7, 8.64e7)
_HEAD: Final = re.compile(r"<svg [^>]*?viewBox=\"([^\"]*)\"[^>]*>")
_MARK: Final = re.compile(r'<path aria-label="([^"]*)"([^>]*)/>')
_OUTLINE: Final = re.compile(r'(?<= d=")[^"]*')
_TOO_EXACT: Final = re.compile(r"(\.\d)\d+")


def line_chart(
    title: str, times: Sequence[datetime], lines: Mapping[str, Sequence[float | None]], *, is_duration: bool = False
) -> str:
    """
    Lines over time, with a gap where a value is missing, and their names below.

    Where the values span decades the axis is logarithmic, and nothing is drawn for zero.

    Args:
        title: What is shown.
        times: In UTC, ascending.
        lines: At most ``LINES_MAX`` names, each with one value a time.
        is_duration: The values are milliseconds.
    """
    known = [value for line in lines.values() for value in line if value is not None and value > 0]
    if not known:
        return empty(title)
    low, high = min(known), max(known)
    is_log = high >= _SPAN_FOR_LOG * low
    said = short_duration if is_duration else short_number
    rows = []
    for name, line in lines.items():
        about = f"{name}: up to {said(max((value for value in line if value is not None), default=0))}"
        drawn = [None if value is None or (is_log and value <= 0) else value for value in line]
        for at, (before, value, after) in enumerate(zip([None, *drawn], drawn, [*drawn[1:], None], strict=False)):
            alone = value if before is None and after is None else None
            rows.append({"time": times[at].isoformat(), "line": name, "value": value, "alone": alone, "about": about})
    axis: dict[str, Any] = {"tickCount": 5, "labelExpr": _DURATION_LABEL if is_duration else _NUMBER_LABEL}
    if is_log:
        axis["values"] = [
            step for step in (_DURATION_TICKS if is_duration else _NUMBER_TICKS) if low / 3 <= step <= high * 3
        ]
    colours = {"domain": list(lines), "range": [f"var(--c{number})" for number in range(len(lines))]}
    encoding = {
        "x": {
            "field": "time",
            "type": "temporal",
            "scale": {"type": "utc"},
            "axis": {"grid": False, "tickCount": 6, "format": _TIME_LABELS},
        },
        "y": {"type": "quantitative", "scale": {"type": "log"} if is_log else {"zero": True}, "axis": axis},
        "color": {"field": "line", "type": "nominal", "scale": colours, "legend": None},
        "description": {"field": "about"},
    }
    # A value between two gaps would draw nothing as a line.
    layers = [
        {"mark": {"type": "line", "strokeWidth": 1.8, "strokeJoin": "round"}, "encoding": {"y": {"field": "value"}}},
        {
            "transform": [{"filter": "isValid(datum.alone)"}],
            "mark": {"type": "point", "filled": True, "size": 30, "opacity": 1},
            "encoding": {"y": {"field": "alone"}},
        },
    ]
    about = f"{title}: {len(lines)} lines over {len(times)} steps, up to {said(high)}"
    names = "".join(
        f'<li><span class="key" style="background:var(--c{number})"></span>{escape(name)}</li>'
        for number, name in enumerate(lines)
    )
    spec = {"height": _HEIGHT, "data": {"values": rows}, "encoding": encoding, "layer": layers}
    return _svg(title, about, spec) + f'<ul class="legend">{names}</ul>'


def heat_map(title: str, rows: Sequence[str], columns: Sequence[str], cells: Sequence[Sequence[float]]) -> str:
    """Cells whose depth follows the square root of their share of the deepest one."""
    deepest = max((value for row in cells for value in row), default=0.0)
    if deepest <= 0:
        return empty(title)
    values = [
        {"row": name, "column": column, "value": value, "about": f"{name} {column}: {short_number(value)}"}
        for name, line in zip(rows, cells, strict=True)
        for column, value in zip(columns, line, strict=True)
    ]
    axis = {"labelAngle": 0, "grid": False, "labelOverlap": True}
    depth = {"type": "sqrt", "domain": [0, deepest], "range": [0.05, 1]}
    spec = {
        "height": _CELL_HEIGHT * len(rows),
        "data": {"values": values},
        "mark": {"type": "rect", "color": "var(--heat)"},
        "encoding": {
            "x": {"field": "column", "type": "ordinal", "sort": list(columns), "axis": {**axis, "orient": "top"}},
            "y": {"field": "row", "type": "ordinal", "sort": list(rows), "axis": axis},
            "opacity": {"field": "value", "type": "quantitative", "scale": depth, "legend": None},
            "description": {"field": "about"},
        },
    }
    return _svg(title, f"{title}: {len(rows)} by {len(columns)} cells, the deepest {short_number(deepest)}", spec)


def empty(title: str) -> str:
    """In place of a drawing that has nothing to show."""
    return f'<p class="empty" role="img" aria-label="{escape(title)}">Nothing to show yet.</p>'


def _svg(title: str, about: str, spec: Mapping[str, Any]) -> str:
    from vl_convert import vegalite_to_svg

    drawn = vegalite_to_svg({"width": _WIDTH, "config": _CONFIG, **spec}, vl_version=_VEGA_LITE, allowed_base_urls=[])
    drawn = _OUTLINE.sub(lambda path: _TOO_EXACT.sub(r"\1", path[0]), drawn)
    drawn = _MARK.sub(r"<path\2><title>\1</title></path>", drawn)
    told = f'role="img" aria-label="{escape(title)}"><title>{escape(title)}</title><desc>{escape(about)}</desc>'
    return _HEAD.sub(lambda head: f'<svg viewBox="{head[1]}" {told}', drawn, count=1)
