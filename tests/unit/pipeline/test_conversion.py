"""Lines become rows the same way whether they are cut or parsed, and what is no record is set apart."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import orjson
import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.pipeline.lake_support import write_events
from tidings.core.events import Event, EventMeta
from tidings.log.embedded import open_log
from tidings.log.segment import encode_line
from tidings.pipeline.line_conversion import EVENTS, event_tables, flawed_lines, lines_of, row_of, split_lines

META = {
    "written_at": "2026-11-15T10:11:35.725499Z",
    "topic": "demo",
    "type": "MADE",
    "space_id": "shared:home",
    "event_id": "ev-1",
    "ts": "2026-11-14T23:59:59.999999Z",
}


def line(payload: object = None, *, offset: int = 0, seq: int = 1, raw: bytes | None = None, **meta: Any) -> bytes:
    """A line as the log writes it."""
    body = orjson.dumps({} if payload is None else payload) if raw is None else raw
    return encode_line(
        b'"offset":%d,"seq":%d,"meta":%b,"payload":%b}' % (offset, seq, orjson.dumps({**META, **meta}), body)
    )


def converted(data: bytes, folder: Path) -> list[dict[str, Any]]:
    """The rows that are written."""
    assert write_events(data, folder / "rows.parquet") == []
    found: list[dict[str, Any]] = pq.read_table(folder / "rows.parquet").to_pylist()
    return found


def parsed(data: bytes) -> list[dict[str, Any]]:
    """The rows as the parser makes them, line by line."""
    rows = [row_of(each) for each in data.split(b"\n")[:-1]]
    found: list[dict[str, Any]] = pa.Table.from_pylist(rows, schema=EVENTS).to_pylist()
    return found


def test_the_payload_is_kept_byte_for_byte(tmp_path: Path) -> None:
    """
    Whatever a payload looks like, its text is the log's own.
    """
    raws = [
        b"{}",
        b'{"a":1e16,"b":-0.0,"c":123456789012345678901234567890}',
        '{"é":"ü \\u0000 \\" ,\\"payload\\": ","payload":{"payload":1}}'.encode(),
        b'{"a":1,"a":2}',
    ]

    rows = converted(b"".join(line(raw=raw) for raw in raws), tmp_path)

    assert [row["payload"].encode() for row in rows] == raws


def test_every_column_is_filled(tmp_path: Path) -> None:
    """
    Each part of the envelope has its column; the day is that of the event's own time in UTC.
    """
    (row,) = converted(
        line(
            {"n": 1},
            offset=7,
            seq=42,
            actor={"id": "a"},
            trace_id="tr",
            idem_key="k",
            ttl_sec=60,
            device="phone",
            partitions=["p1", "p2"],
            band="RED",
            priority=3,
            qos={"urgency": 2},
            extra={"own": True},
        ),
        tmp_path,
    )

    assert (row["topic"], row["offset"], row["seq"], row["event_id"]) == ("demo", 7, 42, "ev-1")
    assert (row["actor"], row["device"], row["priority"]) == ('{"id":"a"}', "phone", "3")
    assert (row["trace_id"], row["idem_key"], row["ttl_sec"], row["band"]) == ("tr", "k", 60, "RED")
    assert (row["qos"], row["extra"], row["partitions"]) == ('{"urgency":2}', '{"own":true}', ["p1", "p2"])
    assert row["ts"].isoformat() == "2026-11-14T23:59:59.999999+00:00"
    assert row["written_at"].isoformat() == "2026-11-15T10:11:35.725499+00:00"
    assert row["date"].isoformat() == "2026-11-14"
    assert (row["is_sealed"], row["sealed"]) == (False, None)


def test_keys_of_a_newer_version_are_kept(tmp_path: Path) -> None:
    """
    Parts of the envelope that nobody here knows are found in ``extra``, beside the producer's own.
    """
    data = line(new={"deep": [1]}, other=None) + line(new="x", extra={"own": 1}) + line(extra={"own": 1})

    rows = converted(data, tmp_path)

    assert [row["extra"] for row in rows] == [
        '{"meta.new":{"deep":[1]},"meta.other":null}',
        '{"own":1,"meta.new":"x"}',
        '{"own":1}',
    ]
    assert rows == parsed(data)


def test_a_sealed_payload_is_kept_and_not_shown(tmp_path: Path) -> None:
    """
    The payload of a sealed record is empty; what was sealed is kept for whoever has the key.
    """
    (row,) = converted(line({"sealed": "AAAA"}, sealed={"alg": "A256GCM", "key": "k", "nonce": "n"}), tmp_path)

    assert (row["payload"], row["is_sealed"]) == (None, True)
    assert orjson.loads(row["sealed"]) == {
        "how": {"alg": "A256GCM", "key": "k", "nonce": "n"},
        "payload": {"sealed": "AAAA"},
    }


def test_a_payload_of_five_megabytes_passes(tmp_path: Path) -> None:
    """
    A large record takes the same way as a small one.
    """
    payload = {"text": "x" * 5_000_000}

    rows = converted(line(seq=1) + line(payload, seq=2) + line(seq=3), tmp_path)

    assert [len(row["payload"]) for row in rows] == [2, len(orjson.dumps(payload)), 2]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**53), 2**53) | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=8,
)
NAME = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=12)


@settings(max_examples=40)
@given(
    st.lists(
        st.fixed_dictionaries(
            {"space_id": NAME, "event_id": NAME},
            optional={
                "actor": NAME | st.integers(0, 9) | st.dictionaries(st.text(max_size=4), st.integers(0, 9), max_size=2),
                "device": JSON.filter(lambda value: value is not None),
                "trace_id": NAME,
                "partitions": st.lists(NAME, max_size=3),
                "priority": st.integers(0, 9) | NAME,
                "extra": st.dictionaries(st.text(max_size=6), JSON, max_size=3),
                "qos": st.dictionaries(st.text(max_size=6), st.integers(0, 9), max_size=2),
            },
        ),
        min_size=1,
        max_size=8,
    ),
    st.lists(st.dictionaries(st.text(max_size=6), JSON, max_size=3), min_size=8, max_size=8),
)
def test_cutting_and_parsing_agree(
    tmp_path_factory: pytest.TempPathFactory, metas: list[dict[str, Any]], payloads: list[Any]
) -> None:
    """
    On any records that a log can hold, the rows written are those of the parser.
    """
    folder = tmp_path_factory.mktemp("rows")
    data = b"".join(
        line(payload, seq=seq + 1, **meta) for seq, (meta, payload) in enumerate(zip(metas, payloads, strict=False))
    )

    assert by_value(converted(data, folder)) == by_value(parsed(data))


def by_value(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with JSON texts as what they say: an escape may be written in two ways."""
    return [
        {
            name: _said(value) if name in ("actor", "device", "priority", "extra", "qos") else value
            for name, value in row.items()
        }
        for row in rows
    ]


def _said(text: str | None) -> Any:
    try:
        return None if text is None else ("json", orjson.loads(text))
    except orjson.JSONDecodeError:
        return text


def test_whole_lines_that_are_no_records_come_back(tmp_path: Path) -> None:
    """
    A line that passes its checksum and is no record is given back with its place; the others are written.
    """
    foreign = [
        encode_line(b'"hello":1}'),
        encode_line(b'"offset":"x","seq":1,"meta":{},"payload":{}}'),
        encode_line(b"no json"),
    ]
    data = line(seq=1) + foreign[0] + line(seq=2) + foreign[1] + foreign[2] + line(seq=3)

    bad = write_events(data, tmp_path / "rows.parquet")

    assert [data[each.at : each.at + len(each.data) + 1] for each in bad] == foreign
    assert pq.read_table(tmp_path / "rows.parquet")["seq"].to_pylist() == [1, 2, 3]


def test_a_changed_byte_is_noticed() -> None:
    """
    A line that does not match its checksum is found, wherever the change is.
    """
    good = line({"n": 1})
    for at in range(0, len(good) - 1, 7):
        changed = bytearray(good)
        changed[at] ^= 1
        if bytes(changed[at : at + 1]) == b"\n":
            continue
        (bad,) = flawed_lines(good + bytes(changed) + good)
        assert bad.at == len(good)
        assert base64.b64decode(bad.text) == bytes(changed[:-1])
    assert flawed_lines(good * 3) == []


async def test_what_the_log_writes_is_cut(tmp_path: Path) -> None:
    """
    Every line that the log itself writes is cut, with its optional keys or without: only others' lines need the parser.
    """
    log = await open_log(tmp_path)
    await log.append_many(
        [
            Event(EventMeta("plain", "MADE", "shared:home"), {"n": 1}),
            Event(EventMeta("rich", "MADE", "shared:home", "my-id", actor={"user_id": "al"}, trace_id="t"), {"é": "ü"}),
            Event(EventMeta("sync", "MADE", "shared:home", partitions=["a", "b"], extra={"x": {}}), {"payload": {}}),
        ]
    )
    await log.close()
    data = b"".join(path.read_bytes() for path in sorted((tmp_path / ".bus" / "wal").glob("*.jsonl")))

    cut = split_lines(lines_of(data))

    assert cut.rows.tolist() == [0, 1, 2]
    assert cut.columns["topic"].to_pylist() == ["plain", "rich", "sync"]
    assert by_value(converted(data, tmp_path)) == by_value(parsed(data))


def test_lines_of_another_form_keep_their_places_among_the_others(tmp_path: Path) -> None:
    """
    A line whose keys stand in another order, or whose name needs an escape, becomes a row between its neighbours.
    """
    turned = orjson.dumps(dict(reversed(META.items())))
    other = encode_line(b'"offset":1,"seq":2,"meta":%b,"payload":{"n":2}}' % turned)
    data = (
        line(seq=1)
        + other
        + line(seq=3, event_id='a",')
        + line(seq=4, offset=3, extra={"a": {}, "payload": 1})
        + line(seq=5)
    )

    rows = converted(data, tmp_path)

    assert [row["seq"] for row in rows] == [1, 2, 3, 4, 5]
    assert [row["event_id"] for row in rows] == ["ev-1", "ev-1", 'a",', "ev-1", "ev-1"]
    assert rows == parsed(data)


def test_little_memory_means_small_blocks() -> None:
    """
    Data that is larger than what may be held at a time is converted piece by piece, and nothing is missing between two.
    """
    data = b"".join(line({"text": "x" * 1000, "n": seq}, offset=seq, seq=seq) for seq in range(1, 40_001))

    tables, bad = zip(*event_tables(data + encode_line(b"no json"), memory_mb=128), strict=True)

    assert len(tables) > 1
    assert [line.at for found in bad for line in found] == [len(data)]
    assert pa.concat_tables(tables)["seq"].to_pylist() == list(range(1, 40_001))


def test_times_before_1970_are_on_their_own_day(tmp_path: Path) -> None:
    """
    The day is counted down, not towards 1970.
    """
    (row,) = converted(line(ts="1969-12-31T23:59:59.999999Z"), tmp_path)

    assert row["date"].isoformat() == "1969-12-31"
