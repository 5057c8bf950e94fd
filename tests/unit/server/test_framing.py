"""Frames are what RFC 6455 says, and a broadcast is framed once."""

from __future__ import annotations

import pytest

from tidings.server.websocket import CLOSE_REASON_BYTES_MAX, Framer, close_frame, frame, pong_frame


@pytest.mark.parametrize(
    ("size", "head"),
    [
        (0, b"\x81\x00"),
        (125, b"\x81\x7d"),
        (126, b"\x81\x7e\x00\x7e"),
        (65_535, b"\x81\x7e\xff\xff"),
        (65_536, b"\x81\x7f\x00\x00\x00\x00\x00\x01\x00\x00"),
    ],
)
def test_lengths(size: int, head: bytes) -> None:
    """Each of the three forms of a length is used where it belongs."""
    assert frame(b"x" * size) == head + b"x" * size


def test_control_frames() -> None:
    """A pong carries its ping's payload; a goodbye its code and reason."""
    assert pong_frame(b"hi") == b"\x8a\x02hi"
    assert close_frame(4001, "bye") == b"\x88\x05\x0f\xa1bye"


@pytest.mark.parametrize("reason", ["x" * 500, "é" * 200, "x" + "é" * 200])
def test_a_long_reason_is_cut_at_a_letter(reason: str) -> None:
    """A control frame holds 125 bytes; what is left of the reason is still text."""
    made = close_frame(1000, reason)

    assert made[1] <= 125
    assert reason.startswith(made[4:].decode())
    assert len(made[4:]) >= CLOSE_REASON_BYTES_MAX - 1


def test_a_tuple_is_framed_once_and_a_list_every_time() -> None:
    """The same tuple gives the same bytes object; a list that was changed meanwhile gives other bytes."""
    framer = Framer()
    shared, changing = (b"a", b"b"), [b"a"]

    assert framer.framed(shared) == b"\x81\x01a\x81\x01b"
    assert framer.framed(shared) is framer.framed(shared)
    first = framer.framed(changing)
    changing[0] = b"c"
    assert (first, framer.framed(changing)) == (b"\x81\x01a", b"\x81\x01c")


def test_nothing_stays_after_forgetting() -> None:
    """An empty tuple is not taken for remembered work, before or after."""
    framer = Framer()
    framer.framed((b"a",))
    framer.forget()

    assert framer.framed(()) == b""


def test_what_many_share_is_framed_once_for_each_length_of_a_suffix() -> None:
    """Prefixes with a suffix are whole frames of the right length, and the prefixes' own work is done once for suffixes of one length."""
    framer = Framer()
    prefixes = (b"a", b"b" * 124, b"c" * 65_533)

    def whole(suffix: bytes) -> bytes:
        return b"".join(frame(prefix + suffix) for prefix in prefixes)

    assert [framer.framed_with(prefixes, each) for each in (b"1", b"2", b"333", b"")] == [
        whole(each) for each in (b"1", b"2", b"333", b"")
    ]
    assert len(framer._shared) == 2  # without a suffix it is the last work itself


def test_what_was_shared_is_forgotten() -> None:
    """Another tuple in the place of one that is gone is framed anew, and no more than some broadcasts are remembered."""
    framer = Framer()

    for number in range(1_000):
        text = b"%d" % number
        assert framer.framed_with((text,), b"!") == frame(text + b"!")
        assert len(framer._shared) <= 64
    framer.forget()

    assert not framer._shared
