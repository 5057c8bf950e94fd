"""Lines become rows the same way by the quick parser and by the careful one, and what is no record is set apart."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import orjson
import pyarrow.parquet as pq  # type: ignore[import-untyped]
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tidings.log.segment import encode_line
from tidings.pipeline.conversion import Converter, flawed_lines, write_slowly

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
    """The rows of the quick parser."""
    converter = Converter(256)
    try:
        assert converter.write(data, folder / "rows.parquet") == []
    finally:
        converter.close()
    found: list[dict[str, Any]] = pq.read_table(folder / "rows.parquet").to_pylist()
    return found


def slowly(data: bytes, folder: Path) -> list[dict[str, Any]]:
    """The rows of the careful one."""
    assert write_slowly(data, folder / "slow.parquet") == []
    found: list[dict[str, Any]] = pq.read_table(folder / "slow.parquet").to_pylist()
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
    assert rows == slowly(data, tmp_path)


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
def test_both_parsers_agree(
    tmp_path_factory: pytest.TempPathFactory, metas: list[dict[str, Any]], payloads: list[Any]
) -> None:
    """
    On any records that a log can hold, the quick parser's rows are those of the careful one.
    """
    folder = tmp_path_factory.mktemp("rows")
    data = b"".join(
        line(payload, seq=seq + 1, **meta) for seq, (meta, payload) in enumerate(zip(metas, payloads, strict=False))
    )

    assert by_value(converted(data, folder)) == by_value(slowly(data, folder))


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
    converter = Converter(256)

    bad = converter.write(data, tmp_path / "rows.parquet")

    converter.close()
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
