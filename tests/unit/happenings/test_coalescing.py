"""Coalescing: of happenings that are alike one in each window, and a cursor that loses nothing."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.happenings import AnyHappening, Coalescing, Envelope
from tidings.happenings.coalescing import Coalescer, Selection, coalescing_from_json
from tidings.happenings.errors import InvalidCoalescing
from tidings.happenings.variants import CustodyStateReported, HealthStatus, PluginEvent

from .support import AT_MS, released, taken


def report(handle_id: str, health: HealthStatus = HealthStatus.HEALTHY) -> CustodyStateReported:
    return CustodyStateReported(at_ms=AT_MS, plugin="org.example.player", handle_id=handle_id, health=health)


def coalescer(*labels: str, window_ms: int = 100, selection: Selection = "latest") -> Coalescer:
    return Coalescer(Coalescing(labels, window_ms, selection))


@pytest.mark.req("H61")
@pytest.mark.parametrize(("selection", "chosen"), [("latest", "unhealthy"), ("first", "healthy")])
def test_a_window_gives_one_with_the_highest_seq(selection: Selection, chosen: str) -> None:
    """Three alike within a window become the latest of them, or the first if asked, under the highest seq."""
    coalesced = coalescer("variant", "handle_id", window_ms=125, selection=selection)
    for seq, health in enumerate(HealthStatus, 3):
        assert coalesced.observe(Envelope(seq, report("h", health)), seq / 64) == []

    assert coalesced.flush(10.99 / 64) == []
    assert coalesced.flush(11 / 64) == [Envelope(5, report("h", HealthStatus(chosen)), 5)]
    assert coalesced.ends_at is None


@pytest.mark.req("H61")
def test_a_window_ends_when_its_first_says() -> None:
    """It lasts from the first, however many follow; the next one opens a new window."""
    coalesced = coalescer("handle_id", window_ms=125)
    delivered = []
    for seq in range(1, 25):  # eight fall into each window
        now = seq / 64
        delivered += coalesced.flush(now)
        delivered += coalesced.observe(Envelope(seq, report("h")), now)

    assert [each.seq for each in delivered] == [8, 16]
    assert [each.seq for each in coalesced.drain()] == [24]


@pytest.mark.req("H61")
def test_only_equal_values_of_all_labels_are_alike() -> None:
    """Values are compared one by one, in whatever order the labels were named, so that no two combinations can be mistaken for each other."""
    for labels in (("event_type", "plugin"), ("plugin", "event_type", "plugin")):
        coalesced = coalescer(*labels)
        for seq, (plugin, event_type) in enumerate([("a|b", "c"), ("a", "b|c"), ("a", "c"), ("a|b", "c")], 1):
            event = PluginEvent(at_ms=AT_MS, plugin=plugin, event_type=event_type, payload=None)
            assert coalesced.observe(Envelope(seq, event), 0.0) == []
        assert [each.seq for each in coalesced.drain()] == [2, 3, 4]


@pytest.mark.req("H66")
def test_what_lacks_a_label_is_not_held_up() -> None:
    """A release has no shelf: it passes at once, under its own seq, and what has one is held back."""
    coalesced = coalescer("plugin", "shelf")

    assert coalesced.observe(Envelope(1, taken(1)), 0.0) == []
    assert coalesced.observe(Envelope(2, released(1)), 0.0) == [Envelope(2, released(1), 0)]
    assert coalesced.flush(0.1) == [Envelope(1, taken(1), 2)]


@pytest.mark.req("H64", "H66")
def test_keys_of_a_plugins_payload_can_be_named() -> None:
    """Sixty readings of one sensor become one, the payload whole; a reading without the key passes."""
    coalesced = coalescer("variant", "plugin", "sensor_id")

    def reading(payload: Any) -> AnyHappening:
        return PluginEvent(at_ms=AT_MS, plugin="org.example.sensor", event_type="reading", payload=payload)

    for seq in range(1, 61):
        assert coalesced.observe(Envelope(seq, reading({"sensor_id": "S1", "value": seq})), seq / 1000) == []
    assert len(coalesced.observe(Envelope(61, reading(["S1"])), 0.061)) == 1
    assert coalesced.flush(1.0) == [Envelope(60, reading({"sensor_id": "S1", "value": 60}), 61)]


@pytest.mark.parametrize(("asked_ms", "is_ms"), [(-5, 1), (0, 1), (1, 1), (5000, 5000), (60_000, 5000)])
def test_a_window_is_brought_into_its_range(asked_ms: int, is_ms: int) -> None:
    """A window lasts from 1 to 5000 milliseconds."""
    coalesced = coalescer("variant", window_ms=asked_ms)
    coalesced.observe(Envelope(1, report("h")), 10.0)

    assert coalesced.ends_at == 10.0 + is_ms / 1000


def test_no_more_than_1024_windows_are_open() -> None:
    """With a window for every handle, the oldest is ended early when there are too many."""
    coalesced = coalescer("handle_id")
    delivered = [
        each for seq in range(1, 1031) for each in coalesced.observe(Envelope(seq, report(f"h{seq}")), seq / 1e6)
    ]

    assert [(each.seq, each.resume_seq) for each in delivered] == [(seq, seq) for seq in range(1, 7)]
    assert len(coalesced.drain()) == 1024


@pytest.mark.req("H67")
@given(
    handles=st.lists(st.sampled_from(["a", "b", "c", ""]), min_size=1, max_size=40),
    gaps_ms=st.lists(st.integers(0, 60), min_size=40, max_size=40),
    selection=st.sampled_from(["latest", "first"]),
    cut=st.integers(0, 60),
)
def test_resuming_from_the_cursor_misses_nothing(
    handles: list[str], gaps_ms: list[int], selection: Selection, cut: int
) -> None:
    """
    Wherever a subscriber stops, what it was given and what comes after its ``resume_seq`` together have the one to be delivered of every window.

    A window's others made way for it. Cursors never go back, and one that was given everything resumes after the last.
    """
    coalesced = coalescer("shelf", "handle_id", selection=selection)
    stream = [Envelope(seq, taken(name) if name else released(seq)) for seq, name in enumerate(handles, 1)]
    delivered: list[Envelope] = []
    now = 0.0
    windows: list[list[int]] = []
    open_: dict[str, tuple[float, list[int]]] = {}
    for envelope, name, gap_ms in zip(stream, handles, gaps_ms, strict=False):
        now += gap_ms / 1000
        delivered += coalesced.flush(now)
        delivered += coalesced.observe(envelope, now)
        if not name:
            windows.append([envelope.seq])
        elif name in open_ and now < open_[name][0]:
            open_[name][1].append(envelope.seq)
        else:
            open_[name] = (now + 0.1, [envelope.seq])
            windows.append(open_[name][1])
    delivered += coalesced.drain()
    seen = delivered[: cut % (len(delivered) + 1)]
    cursor = seen[-1].resume_seq or 0 if seen else 0

    has_seq = {each.seq for each in seen}
    for window in windows:
        wanted = window[-1] if selection == "latest" else window[0]
        assert window[-1] in has_seq or wanted > cursor
    cursors = [each.resume_seq or 0 for each in delivered]
    assert cursors == sorted(cursors)
    assert cursors[-1] == len(stream)
    assert sorted(each.seq for each in delivered) == sorted(window[-1] for window in windows)


@pytest.mark.parametrize(
    ("members", "coalescing"),
    [
        ({}, None),
        ({"labels": ["plugin"]}, Coalescing(("plugin",), 100)),
        ({"labels": ["plugin"], "window_ms": 250}, Coalescing(("plugin",), 250)),
        ({"coalesce": {"labels": ["a", "b"], "selection": "first"}}, Coalescing(("a", "b"), 100, "first")),
    ],
)
def test_both_spellings_are_read(members: dict[str, Any], coalescing: Coalescing | None) -> None:
    """As one object, or as labels and window beside each other; the window is 100 ms if it is left out."""
    assert coalescing_from_json(**members) == coalescing


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ({"labels": []}, "at least one label"),
        ({"coalesce": {"labels": []}}, "at least one label"),
        ({"window_ms": 100}, "no labels"),
        ({"coalesce": {"labels": ["a"]}, "window_ms": 100}, "both forms"),
        ({"coalesce": {"labels": ["a"]}, "labels": ["a"]}, "both forms"),
        ({"labels": "plugin"}, r"coalesce\.labels: Expected `array`"),
        ({"labels": ["a"], "window_ms": "100"}, r"coalesce\.window_ms: Expected `int`"),
        ({"coalesce": {"labels": ["a"], "selection": "last"}}, r"coalesce\.selection: Invalid enum value 'last'"),
        ({"coalesce": {"labels": ["a"], "window": 1}}, "unknown field `window`"),
        ({"coalesce": []}, "Expected `object`"),
    ],
)
def test_what_cannot_be_coalesced_is_told_why(members: dict[str, Any], message: str) -> None:
    """No label, a window without labels, both spellings at once and members that do not fit are refused."""
    with pytest.raises(InvalidCoalescing, match=message):
        coalescing_from_json(**members)


@pytest.mark.parametrize(
    ("coalescing", "message"),
    [
        (Coalescing(()), "at least one label"),
        (Coalescing("variant"), "labels"),  # type: ignore[arg-type]
        (Coalescing((5,)), "labels"),  # type: ignore[arg-type]
        (Coalescing(("variant",), window_ms=float("nan")), "window_ms"),  # type: ignore[arg-type]
        (Coalescing(("variant",), selection="last"), "selection"),  # type: ignore[arg-type]
    ],
)
def test_a_coalescer_checks_what_it_is_given(coalescing: Coalescing, message: str) -> None:
    """Also what is made in process: a window that never ends would hold its happenings back for ever."""
    with pytest.raises(InvalidCoalescing, match=message):
        Coalescer(coalescing)
