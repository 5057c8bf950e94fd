"""Cutting input into lines: any blocks give the same lines, and no line is kept that is too long."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from tidings.cli.append import Line, LineSplitter


def split(blocks: list[bytes], line_bytes_max: int = 1000) -> list[Line]:
    splitter = LineSplitter(line_bytes_max)
    return [line for block in blocks for line in splitter.feed(block)] + splitter.finish()


@given(st.lists(st.text("ab \n", max_size=8).map(str.encode), max_size=8))
def test_blocks_do_not_matter(blocks: list[bytes]) -> None:
    """However the input is cut into blocks, each line that is not blank comes once, with its number."""
    text = b"".join(blocks).split(b"\n")

    assert split(blocks) == [Line(number, line) for number, line in enumerate(text, 1) if line.strip()]


def test_a_line_that_is_too_long_is_told_and_not_kept() -> None:
    """Such a line has a number and no data, and the next one is whole again."""
    assert split([b"x" * 6, b"x" * 6, b"x\nab\n", b"y" * 11], 10) == [Line(1, None), Line(2, b"ab"), Line(3, None)]
