"""
``tidings pipeline report``: one HTML page that needs nothing but itself.

Plots are inline SVG; there is no script, no font and no picture from elsewhere, so the page can be mailed, printed and kept.
Each plot scales with its place, has a title and description for screen readers, and takes its colours from the page's style
sheet. The page states up to which seq it is true and holds no other time than the data's own: the same lake gives the same
bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from .export import fresh_file
from .lake import Lake
from .report_facts import Facts, read_facts

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


class PlotLine(NamedTuple):
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


def line_plot(title: str, unit: str, lines: Sequence[PlotLine], ticks: Sequence[str]) -> str:
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


_WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HOURS: Final = tuple(f"{hour:02d}" for hour in range(24))
_STATES: Final = {"caught_up": "good", "behind": "warn", "stalled": "bad"}
_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--paper:#fff;--panel:#f5f7f9;--rule:#d8dee4;--heat:#0b6e99;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#b8860b;--c5:#56b4e9;--c6:#777;--good:#2e8b57;--warn:#b8860b;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa7b4;--paper:#0d1117;--panel:#161b22;--rule:#30363d;--heat:#58b4e0;
--c0:#58a6ff;--c1:#f0883e;--c2:#3fb98a;--c3:#e39cc4;--c4:#d9a92b;--c5:#8ccff0;--c6:#aaa;--good:#3fb950;--warn:#d29922;--bad:#f85149}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:16px;font:16px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.1rem;margin:0 0 .4em}p{margin:.3em 0}
.soft,.note,.empty{color:var(--soft)}.empty{padding:.8em 0;text-align:center}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px;margin:14px 0;padding:0}
.numbers div{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:10px}
.numbers dt{color:var(--soft);font-size:.85rem}.numbers dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
section{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:12px;min-width:0;break-inside:avoid}
section.wide{grid-column:1/-1}
svg{width:100%;height:auto;display:block}svg text{font-size:12.5px;fill:var(--soft)}.end{text-anchor:end}.middle{text-anchor:middle}
.grid{stroke:var(--rule)}.line{fill:none;stroke-width:1.8;stroke-linejoin:round;stroke-linecap:round}
.line.c0{stroke:var(--c0)}.line.c1{stroke:var(--c1)}.line.c2{stroke:var(--c2)}.line.c3{stroke:var(--c3)}.line.c4{stroke:var(--c4)}
.line.c5{stroke:var(--c5)}.line.c6{stroke:var(--c6)}
.dot.c0{fill:var(--c0)}.dot.c1{fill:var(--c1)}.dot.c2{fill:var(--c2)}.dot.c3{fill:var(--c3)}.dot.c4{fill:var(--c4)}
.dot.c5{fill:var(--c5)}.dot.c6{fill:var(--c6)}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.key.c0{background:var(--c0)}.key.c1{background:var(--c1)}.key.c2{background:var(--c2)}.key.c3{background:var(--c3)}
.key.c4{background:var(--c4)}.key.c5{background:var(--c5)}.key.c6{background:var(--c6)}
.bar{fill:var(--c0)}.bar.good{fill:var(--good)}.bar.warn{fill:var(--warn)}.bar.bad{fill:var(--bad)}.cell{fill:var(--heat)}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 14px;margin:6px 0 0;padding:0;font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:4px 8px;border-bottom:1px solid var(--rule);vertical-align:top}
td{overflow-wrap:anywhere;min-width:7.5em}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;min-width:0;overflow-wrap:normal}main+section{margin-top:14px}
.bad{color:var(--bad)}.warn{color:var(--warn)}.good{color:var(--good)}
@media print{:root{color-scheme:light}body{max-width:none;padding:0;font-size:11pt}main{grid-template-columns:1fr 1fr}
section,.numbers div{border-color:#bbb;background:none}*{print-color-adjust:exact;-webkit-print-color-adjust:exact}}
"""


def write_report(lake: Lake, path: Path) -> Facts:
    """
    Write the page.

    Raises:
        LakeDamaged: A table cannot be read. No page is written.
    """
    facts = read_facts(lake)
    with fresh_file(path) as file:
        file.write(render(facts).encode())
    return facts


def render(facts: Facts) -> str:
    """The page as text."""
    body = "".join([_head(facts), "<main>", *_sections(facts), "</main>", _foot(facts)])
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tidings pipeline report</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _head(facts: Facts) -> str:
    lagging = sum(1 for group in facts.groups if group[2])
    letters = sum(letter[4] for letter in facts.letters)
    numbers = (
        ("Events", human(facts.events)),
        ("Topics", str(len(facts.topics))),
        ("Payload bytes", human(facts.payload_bytes)),
        ("Groups behind", f"{lagging} of {len(facts.groups)}"),
        ("Dead letters", human(letters)),
        ("Quarantined lines", human(sum(count for name, count, _ in facts.quality if name.startswith("quarantined")))),
    )
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers)
    if facts.first is None or facts.last is None:
        span = "The lake holds no events yet."
    else:
        span = f"Events from {_time(facts.first)} to {_time(facts.last)} UTC, up to seq {facts.seq}, epoch {escape(facts.epoch)}."
    return f'<header><h1>Pipeline report</h1><p class="soft">{span}</p><dl class="numbers">{cards}</dl></header>'


def _sections(facts: Facts) -> list[str]:
    every = "minute" if facts.step_minutes == 1 else f"{facts.step_minutes} minutes"
    return [
        _section(
            "Events a minute, by topic",
            line_plot(
                "Events a minute, by topic",
                "events/min",
                [PlotLine(name, values) for name, values in facts.rates.items()],
                facts.ticks,
            ),
            f"By time of the event; one point for every {every}.",
        ),
        _section(
            "From happening to being written",
            line_plot(
                "Latency", "ms", [PlotLine(name, values) for name, values in facts.latencies.items()], facts.ticks
            ),
            "Percentiles of each minute, averaged by its events. Below zero: a clock ahead of the log's.",
        ),
        _section(
            "Lag of groups",
            bar_plot(
                "Lag of groups",
                "events",
                [
                    Bar(f"{topic} / {group}", lag, _STATES.get(state, ""))
                    for topic, group, lag, state, _ in facts.groups
                ],
            ),
            "Events that are not acknowledged yet.",
        ),
        _section(
            "When events happen",
            heat_map("Events by weekday and hour", "events", _WEEKDAYS, _HOURS, facts.heat),
            "By weekday and hour, in UTC.",
        ),
        _section(
            "Data quality",
            bar_plot("Data quality", "rows", [Bar(*each) for each in facts.quality]),
            "Nothing here is lost: quarantined lines are kept with their place in the file.",
        ),
        _section(
            "Dead letters by kind",
            _table(
                ("Category", "Group", "Error", "Letters>"),
                [
                    (
                        f"{category}, poison" if is_poison else category,
                        f"{topic} / {group}",
                        shape,
                        human(count),
                    )
                    for category, topic, group, shape, count, is_poison in facts.letters
                ],
            ),
        ),
        _section(
            "Topics",
            _table(
                ("Topic", "Events>", "Bytes>", "Median ms>", "Worst p99 ms>", "Last event"),
                [
                    (topic, human(events), human(size), human(p50), human(p99), _time(last))
                    for topic, events, size, p99, p50, last in facts.topics
                ],
            ),
            is_wide=True,
        ),
        _section(
            "Sync traffic",
            _table(
                ("Partition", "Client", "Events>", "Last"),
                [
                    (partition, client or "(unknown)", human(count), _time(last))
                    for partition, client, count, last in facts.clients
                ],
            ),
        ),
        _section(
            "Predictions",
            _table(
                ("Space", "Head", "Rows>", "Brier>", "ECE>", "Last day"),
                [
                    (space, head, human(n), f"{b:.4f}", f"{e:.4f}", str(day))
                    for space, head, n, b, e, day in facts.heads
                ],
            ),
            "Mean over days, by rows. * stands for all heads of a space.",
        ),
        _section(
            "Drifting features",
            _table(
                ("Space", "Set", "Feature", "Day", "PSI>", "z>"),
                [
                    (space, name, feature, str(day), _number(psi), _number(z))
                    for space, name, feature, day, psi, z in facts.drifts
                ],
            ),
        ),
        _section(
            "Click rates and gate thresholds",
            (
                _table(
                    ("Space", "Lists>", "Clicked>"), [(space, human(n), f"{ctr:.1%}") for space, n, ctr in facts.clicks]
                )
                if facts.clicks or not facts.proposals
                else ""
            )
            + _table_if(
                ("Space", "Decisions>", "Admit now>", "Proposed>", "Regretted now>", "then>"),
                [
                    (space, human(n), _number(now), _number(proposed), human(before), human(after))
                    for space, n, now, proposed, before, after in facts.proposals
                ],
            ),
        ),
    ]


def _foot(facts: Facts) -> str:
    rows = [(name, human(count), human(size)) for name, count, size in facts.tables]
    return _section("Tables", _table(("Table", "Rows>", "Bytes on disk>"), rows), is_wide=True)


def _section(title: str, content: str, note: str = "", *, is_wide: bool = False) -> str:
    said = f'<p class="note">{escape(note)}</p>' if note else ""
    kind = ' class="wide"' if is_wide else ""
    return f"<section{kind}><h2>{escape(title)}</h2>{content}{said}</section>"


def _table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; a column whose name ends in ``>`` holds numbers."""
    if not rows:
        return '<p class="empty">Nothing to show yet.</p>'
    kinds = [' class="n"' if name.endswith(">") else "" for name in columns]
    head = "".join(f"<th{kind}>{escape(name.rstrip('>'))}</th>" for name, kind in zip(columns, kinds, strict=True))
    body = "".join(
        "<tr>" + "".join(f"<td{kind}>{escape(cell)}</td>" for cell, kind in zip(row, kinds, strict=True)) + "</tr>"
        for row in rows
    )
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _table_if(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table that is left out without rows: the one before it has said so."""
    return _table(columns, rows) if rows else ""


def _number(value: float | None) -> str:
    return "" if value is None else human(value)


def _time(moment: Any) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"
