"""
``tidings pipeline report``: one HTML page that needs nothing but itself.

Plots are inline SVG; there is no script, no font and no picture from elsewhere, so the page can be mailed, printed and kept. It
says up to which seq it is true and holds no other time than the data's own: the same lake gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import Any, Final

from .export_files import fresh_file
from .lake import Lake
from .report_facts import Facts, read_facts
from .report_plots import Bar, Line, bar_plot, heat_map, human, line_plot

__all__ = ["render", "write_report"]

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
                [Line(name, values) for name, values in facts.rates.items()],
                facts.ticks,
            ),
            f"By time of the event; one point for every {every}.",
        ),
        _section(
            "From happening to being written",
            line_plot("Latency", "ms", [Line(name, values) for name, values in facts.latencies.items()], facts.ticks),
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
