"""
``tidings pipeline report``: one HTML page that needs nothing but itself.

There is no script, no font and no picture from elsewhere, so the page can be mailed, printed and kept. The page states up to
which seq it is true and holds no other time than the data's own: the same lake gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final, NamedTuple

from .export import fresh_file
from .lake import Lake
from .report_charts import heat_map, line_chart
from .report_facts import Facts, read_facts
from .units import short_duration, short_number

_WEEKDAYS: Final = ("Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun")
_HOURS: Final = tuple(f"{hour:02d}" for hour in range(24))
_STATES: Final = {"caught_up": "good", "behind": "warn", "stalled": "bad"}
_ROWS_SHOWN: Final = 8
"""Rows of a table above the fold."""
_STYLE: Final = """
:root{color-scheme:light dark;--ink:#1b1f24;--soft:#5b6570;--paper:#fff;--panel:#f5f7f9;--rule:#d8dee4;--heat:#0b6e99;
--c0:#0072b2;--c1:#d55e00;--c2:#009e73;--c3:#cc79a7;--c4:#b8860b;--c5:#56b4e9;--c6:#777;--good:#2e8b57;--warn:#b8860b;--bad:#c0392b}
@media(prefers-color-scheme:dark){:root{--ink:#e6edf3;--soft:#9aa7b4;--paper:#0d1117;--panel:#161b22;--rule:#30363d;--heat:#58b4e0;
--c0:#58a6ff;--c1:#f0883e;--c2:#3fb98a;--c3:#e39cc4;--c4:#d9a92b;--c5:#8ccff0;--c6:#aaa;--good:#3fb950;--warn:#d29922;--bad:#f85149}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1080px;padding:16px;font:16px/1.45 system-ui,sans-serif;color:var(--ink);background:var(--paper)}
h1{font-size:1.5rem;margin:.2em 0}h2{font-size:1.1rem;margin:0 0 .4em}p{margin:.3em 0}
.soft,.note,.empty{color:var(--soft)}.note{font-size:.88rem}.empty{padding:.8em 0;text-align:center}
.numbers{display:grid;grid-template-columns:repeat(auto-fit,minmax(130px,1fr));gap:10px;margin:14px 0;padding:0}
.numbers div{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:10px}
.numbers dt{color:var(--soft);font-size:.85rem}.numbers dd{margin:0;font-size:1.35rem;font-variant-numeric:tabular-nums}
main{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,440px),1fr));gap:14px}
section{background:var(--panel);border:1px solid var(--rule);border-radius:8px;padding:12px;min-width:0;break-inside:avoid}
section.wide{grid-column:1/-1}
svg{width:100%;height:auto;display:block}
.key{display:inline-block;width:.8em;height:.8em;border-radius:2px;margin-right:.4em}
.legend{list-style:none;display:flex;flex-wrap:wrap;gap:4px 14px;margin:6px 0 0;padding:0;font-size:.85rem}
.scroll{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:.88rem}
th,td{text-align:left;padding:4px 8px;border-bottom:1px solid var(--rule);vertical-align:top}
td{overflow-wrap:anywhere;min-width:7.5em}
td.n,th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap;min-width:0;overflow-wrap:normal}
summary{cursor:pointer}summary h2{display:inline}summary.rest{color:var(--soft);font-size:.88rem;padding:6px 0}
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
    charts, tables = _charts(facts), _tables(facts)
    absent = [table.title.lower() for table in tables if not table.rows]
    body = "".join(
        [
            _head(facts),
            "<main>",
            *charts,
            *(_fold(table) for table in tables if table.rows),
            "</main>",
            f'<p class="note">Nothing to show yet of: {", ".join(absent)}.</p>' if absent else "",
        ]
    )
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>Tidings pipeline report</title><style>{_STYLE}</style></head><body>{body}</body></html>\n"
    )


def _head(facts: Facts) -> str:
    lagging = sum(1 for group in facts.groups if group[2])
    letters = sum(letter[4] for letter in facts.letters)
    quarantined = sum(count for name, count, _ in facts.quality if name.startswith("quarantined"))
    numbers = (
        ("Events", short_number(facts.events)),
        ("Topics", str(len(facts.topics))),
        ("Payload bytes", short_number(facts.payload_bytes)),
        ("Groups behind", f"{lagging} of {len(facts.groups)}"),
        ("Dead letters", short_number(letters)),
        ("Quarantined lines", short_number(quarantined)),
    )
    cards = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in numbers)
    if facts.first is None or facts.last is None:
        span = "The lake holds no events yet."
    else:
        span = (
            f"Events written from {_time(facts.first)} to {_time(facts.last)} UTC, up to seq {facts.seq},"
            f" epoch {escape(facts.epoch)}."
        )
    return f'<header><h1>Pipeline report</h1><p class="soft">{span}</p><dl class="numbers">{cards}</dl></header>'


def _charts(facts: Facts) -> list[str]:
    every = "minute" if facts.step_minutes == 1 else f"{facts.step_minutes} minutes"
    outliers = [
        f"{count} {'event' if count == 1 else 'events'} {what}"
        for count, what in ((facts.ahead, "ahead of the log's clock"), (facts.late, "more than a day late"))
        if count
    ]
    left_out = f" Not drawn: {' and '.join(outliers)}." if outliers else ""
    return [
        _section(
            "Events a minute, by topic",
            line_chart("Events a minute, by topic", facts.times, facts.rates),
            f"By time of writing, in UTC; one point for every {every}.",
        ),
        _section(
            "From happening to being written",
            line_chart("From happening to being written", facts.times, facts.latencies, is_duration=True),
            f"Percentiles of all events of a step.{left_out}",
        ),
        _section(
            "Lag of groups over time",
            line_chart("Lag of groups over time", facts.lag_times, facts.lags),
            "Events not acknowledged, as the runs found them.",
        ),
        _section(
            "When events are written",
            heat_map("Events by weekday and hour", _WEEKDAYS, _HOURS, facts.heat),
            "By weekday and hour, in UTC.",
        ),
    ]


class _Table(NamedTuple):
    """A table; a column whose name ends in ``>`` holds numbers. A cell may be a text and the class of its colour."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str | tuple[str, str]]]
    note: str = ""
    is_wide: bool = False


def _tables(facts: Facts) -> list[_Table]:
    return [
        _Table(
            "Topics",
            ("Topic", "Events>", "Bytes>", "Median latency>", "99th percentile>", "Last written>"),
            [
                (topic, short_number(events), short_number(size), _duration(p50), _duration(p99), _time(last))
                for topic, events, size, p50, p99, last in facts.topics
            ],
            is_wide=True,
        ),
        _Table(
            "Groups",
            ("Group", "Lag>", "Oldest waits>", "State"),
            [
                (
                    f"{topic} / {group}",
                    short_number(lag),
                    _duration(None if waiting_s is None else waiting_s * 1000),
                    (state.replace("_", " "), _STATES.get(state, "")),
                )
                for topic, group, lag, state, waiting_s in facts.groups
            ],
            "Events that are not acknowledged yet, at the end of the last run.",
        ),
        _Table(
            "Data quality",
            ("What", "How many>"),
            [(what, (short_number(count), kind)) for what, count, kind in facts.quality],
            "Nothing here is lost: quarantined lines are kept with their place in the file.",
        ),
        _Table(
            "Dead letters by kind",
            ("Category", "Group", "Error", "Letters>"),
            [
                (f"{category}, poison" if is_poison else category, f"{topic} / {group}", shape, short_number(count))
                for category, topic, group, shape, count, is_poison in facts.letters
            ],
        ),
        _Table(
            "Sync traffic",
            ("Partition", "Client", "Events>", "Last"),
            [
                (partition, client or "(unknown)", short_number(count), _time(last))
                for partition, client, count, last in facts.clients
            ],
        ),
        _Table(
            "Predictions",
            ("Space", "Head", "Rows>", "Brier>", "ECE>", "Last day"),
            [
                (space, head, short_number(n), f"{b:.4f}", f"{e:.4f}", str(day))
                for space, head, n, b, e, day in facts.heads
            ],
            "Mean over days, by rows. * stands for all heads of a space.",
        ),
        _Table(
            "Drifting features",
            ("Space", "Set", "Feature", "Day", "PSI>", "z>"),
            [
                (space, name, feature, str(day), _number(psi), _number(z))
                for space, name, feature, day, psi, z in facts.drifts
            ],
        ),
        _Table(
            "Click rates",
            ("Space", "Lists>", "Clicked>"),
            [(space, short_number(n), f"{ctr:.1%}") for space, n, ctr in facts.clicks],
        ),
        _Table(
            "Gate thresholds",
            ("Space", "Decisions>", "Admit now>", "Proposed>", "Regretted now>", "then>"),
            [
                (space, short_number(n), _number(now), _number(proposed), short_number(before), short_number(after))
                for space, n, now, proposed, before, after in facts.proposals
            ],
        ),
        _Table(
            "Tables",
            ("Table", "Rows>", "Bytes stored>"),
            [(name, short_number(count), short_number(size)) for name, count, size in facts.tables],
            is_wide=True,
        ),
    ]


def _section(title: str, content: str, note: str) -> str:
    return f'<section><h2>{escape(title)}</h2>{content}<p class="note">{escape(note)}</p></section>'


def _fold(table: _Table) -> str:
    """A table that can be folded away; of a long one only the beginning is unfolded."""
    kinds = [' class="n"' if name.endswith(">") else "" for name in table.columns]
    head = "".join(
        f"<th{kind}>{escape(name.rstrip('>'))}</th>" for name, kind in zip(table.columns, kinds, strict=True)
    )
    lines = [
        f"<tr>{''.join(f'<td{kind}>{_cell(cell)}</td>' for cell, kind in zip(row, kinds, strict=True))}</tr>"
        for row in table.rows
    ]

    def shown(rows: Sequence[str]) -> str:
        return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'

    rest = lines[_ROWS_SHOWN:]
    more = f'<details><summary class="rest">{len(rest)} more</summary>{shown(rest)}</details>' if rest else ""
    note = f'<p class="note">{escape(table.note)}</p>' if table.note else ""
    kind = ' class="wide"' if table.is_wide else ""
    return (
        f"<section{kind}><details open><summary><h2>{escape(table.title)}</h2></summary>"
        f"{shown(lines[:_ROWS_SHOWN])}{more}{note}</details></section>"
    )


def _cell(cell: str | tuple[str, str]) -> str:
    return escape(cell) if isinstance(cell, str) else f'<span class="{cell[1]}">{escape(cell[0])}</span>'


def _number(value: float | None) -> str:
    return "" if value is None else short_number(value)


def _duration(ms: float | None) -> str:
    return "" if ms is None else short_duration(ms)


def _time(moment: Any) -> str:
    return f"{moment:%Y-%m-%d %H:%M}"
