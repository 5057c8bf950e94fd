"""The report is one page that needs nothing else, says what the tables say, and is the same each time."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, timedelta
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.pipeline.lake_support import all_records, archive, empty_lake, write_table
from tidings.cognition.jobs.learning_gate import PROPOSALS
from tidings.cognition.jobs.learning_quality import CLICKS, DRIFT_OUTPUT, QUALITY
from tidings.core.events import Event, EventMeta
from tidings.log.memory import MemoryLog
from tidings.pipeline.errors import LakeDamaged
from tidings.pipeline.jobs.operations import DEAD_LETTERS, GROUP_HEALTH, SYNC_JOBS, TOPIC_MINUTES
from tidings.pipeline.lake import Lake
from tidings.pipeline.report import (
    Bar,
    PlotLine,
    bar_plot,
    heat_map,
    human,
    line_plot,
    nice_ceiling,
    render,
    write_report,
)
from tidings.pipeline.report_facts import read_facts
from tidings.pipeline.schemas import QUARANTINE
from tidings.testing import VirtualClock

START = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)  # a Monday
EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a test asks about."""

    VOID = frozenset({"meta", "br", "line", "rect", "path"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag not in ("meta",):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def minute(n: int, topic: str, events: int, **more: Any) -> dict[str, Any]:
    at = START + timedelta(minutes=n)
    row = {"topic": topic, "minute": at, "date": at.date(), "events": events, "payload_bytes": events * 10, "spaces": 1}
    row |= {"sealed": 0, "ahead_of_clock": 0, "latency_ms_p50": 2.0, "latency_ms_p95": 5.0, "latency_ms_p99": 9.0}
    return {**row, "latency_ms_max": 9.0, **more}


def full_lake(folder: Path) -> Lake:
    lake = empty_lake(folder, VirtualClock())
    minutes = [
        minute(0, "orders", 60),
        minute(1, "orders", 30, latency_ms_p50=4.0),
        minute(1, EVIL, 5, ahead_of_clock=3),
    ]
    minutes += [minute(24 * 60, "orders", 12)]
    write_table(lake, "gold.topic_minutes", TOPIC_MINUTES[0].writes[0].schema, minutes)
    lag, _ = GROUP_HEALTH[0].writes
    groups = [
        {"topic": "orders", "group": "billing", "committed": 1, "lag": 7, "state": "stalled", "waiting_s": 3.0},
        {"topic": "orders", "group": "mail", "committed": 8, "lag": 0, "state": "caught_up"},
    ]
    write_table(lake, "gold.group_lag", lag.schema, groups)
    letter = {
        "topic": "orders",
        "group": "billing",
        "category": "transient",
        "error_shape": EVIL,
        "letters": 4,
        "is_poison": True,
    }
    write_table(lake, "gold.dead_letter_categories", DEAD_LETTERS[0].writes[0].schema, [letter])
    traffic = {"hour": START, "partition": "p", "client_id": "c", "events": 3}
    write_table(lake, "gold.sync_traffic", SYNC_JOBS[0].writes[0].schema, [traffic])
    quality, clicks = QUALITY, CLICKS
    day = date(2026, 3, 2)
    write_table(
        lake,
        quality.table,
        quality.schema,
        [{"space_id": "s", "date": day, "head": "h", "rows": 4, "brier": 0.0651, "ece": 0.2}],
    )
    write_table(lake, clicks.table, clicks.schema, [{"space_id": "s", "date": day, "lists": 10, "ctr": 0.25}])
    drift = {
        "set_name": "actions",
        "space_id": "s",
        "feature": "confidence",
        "date": day,
        "psi": 0.8,
        "is_drifted": True,
    }
    write_table(lake, DRIFT_OUTPUT.table, DRIFT_OUTPUT.schema, [drift])
    proposal = {
        "space_id": "s",
        "rows": 30,
        "admit_now": 0.6,
        "admit_proposed": 0.5,
        "regretted_now": 9,
        "regretted_proposed": 2,
    }
    write_table(lake, PROPOSALS.table, PROPOSALS.schema, [proposal])
    bad = {"file": "t.00000001.jsonl", "byte_offset": 7, "reason": "a line's checksum does not match"}
    write_table(lake, QUARANTINE.name, QUARANTINE.schema, [bad, bad])
    return lake


def test_the_page_says_what_the_tables_say(tmp_path: Path) -> None:
    """Totals, groups, failures and learning results are on the page, as text."""
    facts = write_report(full_lake(tmp_path), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    words = " | ".join(Page(text).words)

    assert facts.events == 107
    assert facts.heat[0][9] == 95
    assert facts.heat[1][9] == 12
    assert (facts.step_minutes, len(facts.ticks)) == (13, 111)
    assert facts.rates["orders"][0] == pytest.approx(90 / 13)
    assert facts.latencies["p50"][0] == pytest.approx((60 * 2 + 30 * 4 + 5 * 2) / 95)
    for said in (
        "107",
        "1 of 2",
        "orders / billing",
        "transient, poison",
        "0.0651",
        "25.0%",
        "confidence",
        "quarantined",
    ):
        assert said in words


def test_the_page_needs_nothing_else_and_runs_nothing(tmp_path: Path) -> None:
    """No script, no address, no picture from elsewhere; names from the data are text, whatever they hold."""
    write_report(full_lake(tmp_path), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()
    page = Page(text)

    assert page.open == []
    assert not {"script", "link", "img", "iframe", "object"} & {tag for tag, _ in page.tags}
    assert not any(name.startswith("on") or name in ("src", "href") for _, attrs in page.tags for name in attrs)
    assert re.search(r"https?://|@import|url\(", text) is None
    assert EVIL in "".join(page.words)
    assert [attrs["content"] for tag, attrs in page.tags if tag == "meta" and "content" in attrs] == [
        "width=device-width, initial-scale=1"
    ]


def test_every_plot_tells_what_it_shows(tmp_path: Path) -> None:
    """Each drawing has a title and a description for those who cannot see it."""
    write_report(full_lake(tmp_path), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()

    drawings = re.findall(r"<svg[^>]*>(.*?)</svg>", text, re.DOTALL)
    assert len(drawings) == 5
    assert all(drawing.startswith("<title>") and "<desc>" in drawing for drawing in drawings)


def test_the_same_lake_gives_the_same_bytes(tmp_path: Path) -> None:
    """Two reports of one lake do not differ, and the second replaces the first whole."""
    lake = full_lake(tmp_path)
    write_report(lake, tmp_path / "one.html")
    write_report(lake, tmp_path / "two.html")

    assert (tmp_path / "one.html").read_bytes() == (tmp_path / "two.html").read_bytes()


def test_an_empty_lake_says_so(tmp_path: Path) -> None:
    """Without tables there is a page that says that there is nothing to show."""
    facts = write_report(empty_lake(tmp_path, VirtualClock()), tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text()

    assert facts.events == 0
    assert "The lake holds no events yet." in text
    assert text.count("Nothing to show yet.") >= 9
    assert Page(text).open == []


async def test_a_lake_with_bronze_only_is_fine(tmp_path: Path) -> None:
    """A lake that no job has worked on yet still gives its seq, its tables, and what is not in silver."""
    log = MemoryLog(clock=VirtualClock(), epoch="e1")
    for n in range(3):
        await log.append(Event(EventMeta("t", "X", "s", f"e{n}"), {}))
    lake = empty_lake(tmp_path, VirtualClock())
    archive(lake, await all_records(log), epoch="e1", batch=1)
    facts = read_facts(lake)

    assert (facts.epoch, facts.seq) == ("e1", 3)
    assert ("events repeated, or not yet in silver", 3, "warn") in facts.quality
    assert [(name, rows) for name, rows, _ in facts.tables] == [("bronze.events", 3)]
    await log.close()


def test_a_damaged_lake_leaves_the_old_page(tmp_path: Path) -> None:
    """What cannot be read is told, and the page that was there stays."""
    lake = full_lake(tmp_path)
    (tmp_path / "report.html").write_text("old")
    for file in (lake.folder("gold.group_lag").path / "_delta_log").iterdir():
        file.write_bytes(b"{")

    with pytest.raises(LakeDamaged):
        write_report(empty_lake(tmp_path, VirtualClock()), tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (950, "950"),
        (1234, "1.23k"),
        (2_000_000, "2M"),
        (0.5, "0.5"),
        (12.34, "12.3"),
        (-1500.0, "-1.5k"),
        (0.0123, "0.0123"),
    ],
)
def test_numbers_are_short(value: float, text: str) -> None:
    """A number takes few characters and keeps its size."""
    assert human(value) == text


@given(st.floats(1e-6, 1e12))
def test_the_axis_ends_just_above_the_data(value: float) -> None:
    """The end of an axis is a round number, not below the largest value and at most two and a half times as large."""
    top = nice_ceiling(value)

    assert value * (1 - 1e-9) <= top <= value * 2.5 * (1 + 1e-9)


@given(st.lists(st.none() | st.floats(-1e9, 1e9), min_size=1, max_size=30))
def test_any_line_can_be_drawn(values: list[float | None]) -> None:
    """Gaps, single points, zeros and negative values all make a drawing within its frame."""
    drawn = line_plot("t", "u", [PlotLine("a", values)], [str(n) for n in range(len(values))])
    numbers = [float(y) for y in re.findall(r"[ML][-\d.]+ ([-\d.]+)", drawn)]

    assert all(0 <= y <= 240 for y in numbers)
    assert len(numbers) == sum(value is not None for value in values)
    assert Page(drawn).open == []


def test_bars_and_cells() -> None:
    """Bars have lengths by their values, at most twenty are drawn, and a heat map's deepest cell is full."""
    bars = bar_plot("t", "u", [Bar(f"b{n}", float(n), "good") for n in range(25, 0, -1)])
    cells = heat_map("t", "u", ["r"], ["a", "b"], [[1.0, 4.0]])

    assert bars.count("<rect") == 20
    assert "and 5 more" in bars
    assert re.findall(r'fill-opacity="([\d.]+)"', cells) == ["0.295", "1.000"]
    assert "Nothing to show" in heat_map("t", "u", ["r"], ["a"], [[0.0]])
    assert "Nothing to show" in bar_plot("t", "u", [])


def test_rendering_takes_facts_alone(tmp_path: Path) -> None:
    """The page is a function of the facts."""
    facts = read_facts(full_lake(tmp_path))

    assert render(facts) == render(facts)
