"""A line gives back what was written, or says that it cannot."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.errors import InvalidName
from tidings.log.record import Record
from tidings.log.segment import (
    Flaw,
    decode,
    encode_line,
    head_of,
    is_whole,
    segment_name,
    space_folder,
    split_segment_name,
    whole_end,
)

META = b'{"written_at":"2026-01-01T00:00:00.000000Z","topic":"t","type":"T","space_id":"s","event_id":"e","ts":"x"}'
LINES = [encode_line(b'"offset":%d,"seq":%d,"meta":%b,"payload":{"n":%d}}' % (n, n + 1, META, n)) for n in range(3)]
DATA = b"".join(LINES)


def test_a_line_reads_back_as_it_was_written() -> None:
    """Places, envelope and payload come back; the head alone gives the places."""
    record = decode(LINES[1][:-1])
    assert isinstance(record, Record)
    assert (record.offset, record.seq, record.topic, record.payload) == (1, 2, "t", {"n": 1})
    assert head_of(LINES[1]) == (1, 2, "2026-01-01T00:00:00.000000Z")


@pytest.mark.parametrize("cut", range(len(LINES[0] + LINES[1]), len(DATA)))
def test_a_torn_last_line_is_where_to_go_on(cut: int) -> None:
    """However much of the last line a crash left, what is whole ends before it; whole data ends at its end."""
    assert whole_end(DATA[:cut]) == len(LINES[0] + LINES[1])
    assert whole_end(DATA) == len(DATA)
    assert whole_end(b"") == 0


@given(st.integers(0, len(LINES[0]) - 2), st.integers(1, 255))
def test_no_change_of_one_byte_passes(position: int, flip: int) -> None:
    """Whatever byte is changed, and however, the line is not taken for a record."""
    damaged = bytearray(LINES[0][:-1])
    damaged[position] ^= flip

    assert not is_whole(bytes(damaged))
    assert isinstance(decode(bytes(damaged)), Flaw)


def test_a_sound_checksum_does_not_make_a_record() -> None:
    """A line that checks but is none of ours is told apart from a damaged one."""
    foreign = encode_line(b'"hello":"world"}')
    assert decode(foreign[:-1]) is Flaw.FORMAT


@given(st.from_regex(r"[A-Za-z0-9]+(\.[A-Za-z0-9]+)*", fullmatch=True), st.integers(1, 99_999_999))
@pytest.mark.req("F28")
def test_a_segments_name_gives_back_topic_and_number(topic: str, number: int) -> None:
    """Topics may have dots, and the number has eight digits."""
    assert split_segment_name(segment_name(topic, number)) == (topic, number)
    assert split_segment_name(f"{topic}.jsonl") is None


@pytest.mark.parametrize("space_id", ["..", ".", "a/b", "a\\b", "ü"])
def test_a_space_cannot_reach_out_of_its_folder(space_id: str) -> None:
    """No space id makes a name that a path would treat specially."""
    assert not set(space_folder(space_id)) & set("./\\ü")
    with pytest.raises(InvalidName):
        space_folder(space_id * 100)
