"""Lines that are spelt by compiled code and by Python are the same lines."""

from __future__ import annotations

import shutil
import sysconfig
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from random import Random

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidings.core import ids
from tidings.log.line_codec import (
    IS_COMPILED,
    LogIdMaker,
    encode_before_id,
    encode_record_line,
    encode_record_line_py,
    find_null,
    holds_null,
)
from tidings.log.record import Record
from tidings.log.segment import decode, encode_line

BEFORE_ID = encode_before_id(b"2026-01-01T00:00:00.000000Z", b'"topic":"t","type":"T","space_id":"s",')
NUMBERS = st.integers(0, 2**63 - 1)
IDS = st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=40)
TIMES_US = st.integers(0, 253_402_300_799_999_999)


def us_of(text: str) -> int:
    return (datetime.fromisoformat(text) - datetime(1970, 1, 1, tzinfo=UTC)) // timedelta(microseconds=1)


def test_where_there_is_a_compiler_it_was_used() -> None:
    """A build that fails in silence would cost much of the speed, and nobody would know."""
    has_compiler = shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()

    assert IS_COMPILED or not has_compiler


@given(
    offset=NUMBERS,
    seq=NUMBERS,
    event_id=IDS,
    ts_us=TIMES_US,
    rest=st.sampled_from([b"", b',"actor":"a","ttl_sec":3']),
    payload=st.binary(max_size=300),
)
@example(offset=0, seq=0, event_id='"', ts_us=0, rest=b"", payload=b"{}")
@example(offset=9, seq=10, event_id="\\", ts_us=us_of("2000-02-29T23:59:59.999999Z"), rest=b"", payload=b"{}")
@example(offset=99, seq=100, event_id="\x7f", ts_us=us_of("2100-03-01T00:00:00Z"), rest=b"", payload=b"{}")
@example(offset=1, seq=2, event_id="é", ts_us=us_of("2024-12-31T23:59:59.000001Z"), rest=b"", payload=b"")
def test_both_ways_make_the_same_line(
    offset: int, seq: int, event_id: str, ts_us: int, rest: bytes, payload: bytes
) -> None:
    """Whatever is in it, and whatever was spelt before it, byte for byte."""
    line = encode_record_line(offset, seq, BEFORE_ID, event_id, ts_us, rest, payload)

    assert line == encode_record_line_py(offset, seq, BEFORE_ID, event_id, ts_us, rest, payload)
    assert line == encode_line(line[18:-1])


@pytest.mark.parametrize("spell", [encode_record_line, encode_record_line_py], ids=["encode_record_line", "in Python"])
def test_a_line_reads_back_as_what_it_was_made_from(spell: Callable[..., bytes]) -> None:
    """The line is one that readers take."""
    record = decode(spell(7, 42, BEFORE_ID, "ev-1", us_of("2026-03-01T01:02:03.000004Z"), b"", b'{"n":1}')[:-1])

    assert isinstance(record, Record)
    assert (record.offset, record.seq, record.payload) == (7, 42, {"n": 1})
    assert (record.meta.event_id, record.meta.ts) == ("ev-1", "2026-03-01T01:02:03.000004Z")


@pytest.mark.parametrize("spell", [encode_record_line, encode_record_line_py], ids=["encode_record_line", "in Python"])
@pytest.mark.parametrize("changed", [{"before_id": None}, {"rest": None}, {"event_id": b"e"}, {"payload": "{}"}])
def test_what_is_no_line_is_an_error_and_no_crash(spell: Callable[..., bytes], changed: dict[str, object]) -> None:
    """Compiled code is as strict about its arguments as their types say."""
    given: dict[str, object] = {"offset": 1, "seq": 2, "before_id": BEFORE_ID, "event_id": "e", "ts_us": 3}
    given |= {"rest": b"", "payload": b"{}"}
    with pytest.raises(TypeError):
        spell(**given | changed)


@pytest.mark.parametrize("event_id", ["\ud800", "ev-\udfff"])
def test_an_id_that_is_no_text_is_refused_both_ways(event_id: str) -> None:
    """Half of a pair cannot be written; the checks let none through, and nothing is written if one comes."""
    for spell in (encode_record_line, encode_record_line_py):
        with pytest.raises((TypeError, UnicodeEncodeError)):
            spell(1, 2, BEFORE_ID, event_id, 3, b"", b"{}")


@given(st.text("nulx", max_size=12).map(str.encode) | st.binary(max_size=30))
@example(b"null")
@example(b"nnull")
@example(b"nulnull")
def test_null_is_found_wherever_it_is(json: bytes) -> None:
    """Both ways agree with what Python says."""
    assert holds_null(json) == find_null(json) == (b"null" in json)


@given(seed=st.binary(), seqs=st.lists(NUMBERS, min_size=1))
@example(seed=b"", seqs=[0, 2**63 - 1, *range(600)])
def test_both_ways_make_the_same_ids(seed: bytes, seqs: list[int]) -> None:
    """From the same random bytes both make the same ids, which lead back to their seqs."""
    compiled, plain = LogIdMaker(Random(seed).randbytes), ids.LogIdMaker(Random(seed).randbytes)
    made = [compiled.make(seq) for seq in seqs]

    assert made == [plain.make(seq) for seq in seqs]
    assert all(map(str.isascii, made))
    assert [ids.seq_in_event_id(one) for one in made] == seqs
    assert hash(made[0]) == hash("".join(list(made[0])))
