"""What a decoder refuses is explained in one way: the problem, and the path of the field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tidings.core.validation import UNREADABLE, explain


class Inner(msgspec.Struct, frozen=True):
    """A part."""

    count: int = 0


class Outer(msgspec.Struct):
    """A whole."""

    inner: Inner = Inner()
    many: list[Inner] = []
    named: dict[int, int] = {}


@pytest.mark.parametrize(
    ("text", "type", "expected"),
    [
        (b'{"inner":{"count":"x"}}', Outer, ("Expected `int`, got `str`", "inner.count")),
        (b'{"many":[{"count":null}]}', Outer, ("Expected `int`, got `null`", "many[0].count")),
        (b'{"named":{"a":1}}', Outer, ("Expected `int`, got `str`", "named")),
        (b"[1,true]", list[int], ("Expected `int`, got `bool`", "[1]")),
        (b"3", Outer, ("Expected `object`, got `int`", "body")),
    ],
)
def test_the_path_leads_to_the_field_at_fault(text: bytes, type: Any, expected: tuple[str, str]) -> None:
    """However deep it is, in a list or as a key; a value that is wrong as a whole has the name it was given."""
    with pytest.raises(msgspec.ValidationError) as refused:
        msgspec.json.decode(text, type=type)

    assert explain(refused.value, "body") == expected


@pytest.mark.parametrize("text", [b"{", b'"\xff"', b"[" * 100_000], ids=["cut", "no UTF-8", "too deep"])
def test_whatever_cannot_be_read_is_one_of_the_named_errors(text: bytes) -> None:
    """One tuple names all that decoding raises."""
    with pytest.raises(UNREADABLE):
        msgspec.json.decode(text, type=Any)
