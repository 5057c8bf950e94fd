"""The report is one page that needs nothing else, says what the tables say, and is the same each time."""

from __future__ import annotations

import math
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
from tidings.pipeline.latency_buckets import bucket_ms, bucket_of, percentile_ms
from tidings.pipeline.report import render, write_report
from tidings.pipeline.report_charts import heat_map, line_chart
from tidings.pipeline.report_facts import DAY_MS, read_facts
from tidings.pipeline.schemas import QUARANTINE, SILVER_GROUP_POSITIONS
from tidings.pipeline.units import short_duration, short_number
from tidings.testing import VirtualClock

START = datetime(2026, 3, 2, 9, 0, tzinfo=UTC)  # a Monday
EVIL = '<script>alert("x")</script>'


class Page(HTMLParser):
    """Checks that tags are closed in order, and collects what a test asks about."""

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


def minute(n: int, topic: str, latencies_ms: dict[float, int], **more: Any) -> dict[str, Any]:
    at = START + timedelta(minutes=n)
    events = sum(latencies_ms.values())
    row = {"topic": topic, "minute": at, "date": at.date(), "events": events, "payload_bytes": events * 10, "spaces": 1}
    buckets = [(bucket_of(ms), count) for ms, count in latencies_ms.items()]
    ahead = sum(count for ms, count in latencies_ms.items() if ms < 0)
    return {**row, "sealed": 0, "latency_buckets": buckets, "ahead_of_clock": ahead, **more}


def full_lake(folder: Path) -> Lake:
    lake = empty_lake(folder, VirtualClock())
    minutes = [
        minute(0, "orders", {1.0: 60}),
        minute(1, "orders", {4000.0: 30}),
        minute(1, EVIL, {2.0: 2, -300 * DAY_MS: 1, 300 * DAY_MS: 2}),
        minute(24 * 60, "orders", {1.0: 12}),
    ]
    write_table(lake, "gold.topic_minutes", TOPIC_MINUTES[0].writes[0].schema, minutes)
    positions = [
        {"topic": "orders", "group": "billing", "seen_at": START + timedelta(minutes=n), "lag": lag}
        for n, lag in ((0, 3), (60, 900), (61, 7))
    ]
    write_table(lake, SILVER_GROUP_POSITIONS.name, SILVER_GROUP_POSITIONS.schema, positions)
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
    assert (facts.step_minutes, len(facts.times)) == (13, 111)
    assert facts.rates["orders"][0] == pytest.approx(90 / 13)
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


def test_percentiles_hold_over_all_events_of_a_range(tmp_path: Path) -> None:
    """
    The median of a step, and of a topic, is that of its events: with 72 of 102 at 1 ms it is 1 ms, although the mean of the
    minutes' medians would say 1334 ms.
    """
    facts = read_facts(full_lake(tmp_path))
    topic, events, _, p50, p99, last = facts.topics[0]

    assert (topic, events, last) == ("orders", 102, START + timedelta(days=1))
    assert p50 == pytest.approx(1, rel=0.025)
    assert p99 == pytest.approx(4000, rel=0.025)
    assert facts.latencies["p50"][0] == pytest.approx(1, rel=0.025)
    assert facts.latencies["p99"][0] == pytest.approx(4000, rel=0.025)


def test_outliers_are_counted_and_not_drawn(tmp_path: Path) -> None:
    """Events 300 days ahead of the clock or behind it change no axis; the page says how many they are."""
    facts = write_report(full_lake(tmp_path), tmp_path / "report.html")

    assert (facts.ahead, facts.late) == (1, 2)
    assert (facts.first, facts.last) == (START, START + timedelta(days=1))
    assert max(value for line in facts.latencies.values() for value in line if value is not None) < 4100
    words = " ".join(Page((tmp_path / "report.html").read_text()).words)
    assert "Not drawn: 1 event ahead of the log's clock and 2 events more than a day late." in words


def test_lag_is_shown_over_time(tmp_path: Path) -> None:
    """A group's lag is drawn as the runs found it, and stays as it was until a run finds it changed."""
    facts = read_facts(full_lake(tmp_path))

    assert facts.lag_times[0] == START
    assert len(facts.lag_times) == 62
    assert facts.lags == {"orders / billing": [3.0] * 60 + [900.0, 7.0]}


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
    assert len(drawings) == 4
    assert all(drawing.startswith("<title>") and "<desc>" in drawing for drawing in drawings)


def test_long_tables_fold(tmp_path: Path) -> None:
    """Every table can be folded away, and of a long one the first rows are open and the rest is one click away."""
    lake = empty_lake(tmp_path, VirtualClock())
    rows = [minute(0, f"topic-{n:02d}", {1.0: 100 - n}) for n in range(20)]
    write_table(lake, "gold.topic_minutes", TOPIC_MINUTES[0].writes[0].schema, rows)
    text = render(read_facts(lake))
    folded = re.search(r'<details><summary class="rest">12 more</summary>(.*?)</details>', text)

    assert folded is not None
    assert "topic-08" in folded[1]
    assert "topic-07" not in folded[1]
    assert text.count("<table>") == 1 + text.count("<details open>")


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
    assert text.count("Nothing to show yet") == 5  # four drawings, and the tables in one line
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


def test_a_table_with_a_cut_file_is_told(tmp_path: Path) -> None:
    """Where a data file is not what was committed, that is said with what helps."""
    lake = full_lake(tmp_path)
    for file in lake.files("gold.topic_minutes"):
        (file.folder.path / file.name).write_bytes(b"PAR1")

    with pytest.raises(LakeDamaged, match="repair"):
        write_report(lake, tmp_path / "report.html")


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
    assert short_number(value) == text


@pytest.mark.parametrize(
    ("ms", "text"),
    [
        (0, "0 s"),
        (0.25, "250 µs"),
        (3.21, "3.2 ms"),
        (1500, "1.5 s"),
        (240_000, "4 min"),
        (-7_560_000, "-2.1 h"),
        (30 * DAY_MS, "30 d"),
        (56 * 365.25 * DAY_MS, "56 y"),
    ],
)
def test_durations_have_the_unit_that_suits_them(ms: float, text: str) -> None:
    """Nobody has to count the zeros of milliseconds."""
    assert short_duration(ms) == text


@given(st.lists(st.floats(0, 1e12), min_size=1, max_size=50), st.floats(0.01, 1))
def test_a_percentile_from_counts_is_that_of_the_values(values: list[float], rank: float) -> None:
    """A percentile read from added-up counts is within a fortieth, or a microsecond, of the value at that rank."""
    counts: dict[int, int] = {}
    for value in values:
        counts[bucket_of(value)] = counts.get(bucket_of(value), 0) + 1
    true = sorted(values)[max(0, math.ceil(rank * len(values) - 1e-9) - 1)]

    assert percentile_ms(counts, rank) == pytest.approx(true, rel=0.0251, abs=0.0011)
    assert bucket_ms(0) == 0
    assert percentile_ms({}, rank) is None


def test_values_that_span_decades_have_an_axis_by_their_logarithm() -> None:
    """From a hundred times on, the axis counts decades, so that small values are seen beside large ones; gaps stay gaps."""
    times = [START + timedelta(minutes=n) for n in range(4)]
    wide = line_chart("t", times, {"a": [1.0, None, 0.0, 40_000.0]})
    narrow = line_chart("t", times, {"a": [10.0, 20.0, 30.0, 40.0]})
    spans = line_chart("t", times, {"a": [1.0, 90_000.0, 5.0, 7_200_000.0]}, is_duration=True)

    assert "10k" in Page(wide).words
    assert "0" not in Page(wide).words
    assert "0" in Page(narrow).words
    assert {"1 ms", "10 s", "10 min"} <= set(Page(spans).words)
    assert Page(wide).open == []


def test_nothing_is_drawn_of_nothing() -> None:
    """A drawing without a value says so."""
    assert "Nothing to show" in heat_map("t", ["r"], ["a"], [[0.0]])
    assert "Nothing to show" in line_chart("t", [START], {"a": [None]})
