"""Ids are random where nobody knows the seq yet, and lead back to it where the log made them."""

from __future__ import annotations

import os
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core.ids import LogIdMaker, seq_in_event_id
from tidings.types import new_event_id

SHAPE = re.compile(r"ev-[0-9a-f]{32}")


@pytest.mark.req("F3", "F15")
def test_a_random_id_has_the_usual_shape() -> None:
    """``ev-`` and 32 hex digits."""
    assert SHAPE.fullmatch(new_event_id())


@pytest.mark.req("F15")
def test_random_ids_do_not_repeat() -> None:
    """Thousands of ids, more than one draw of random bytes gives, are all different."""
    assert len({new_event_id() for _ in range(5000)}) == 5000


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_makes_ids_of_its_own() -> None:
    """A child process does not hand out the ids that its parent has in store."""
    new_event_id()
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writing, new_event_id().encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as pipe:
        from_child = pipe.read()
    os.waitpid(child, 0)

    assert SHAPE.fullmatch(from_child)
    assert from_child not in {new_event_id() for _ in range(300)}


@given(st.integers(1, 2**64 - 1))
def test_a_made_id_leads_back_to_its_seq(seq: int) -> None:
    """From the id alone the seq can be told, for any seq."""
    made = LogIdMaker().make(seq)

    assert SHAPE.fullmatch(made)
    assert seq_in_event_id(made) == seq


def test_made_ids_share_nothing_but_chance() -> None:
    """The random part of an id is never that of another, so no id tells anything of the next one; nor do two for one seq."""
    maker = LogIdMaker()
    made = [maker.make(1 + n // 2) for n in range(5000)]

    assert len({each[3:19] for each in made}) == 5000


@pytest.mark.parametrize(
    "other",
    [
        "",
        "ev-",
        "e1",
        "ev-" + "0" * 31,
        "ev-" + "0" * 33,
        "ev-" + "0" * 31 + "G",
        "EV-" + "0" * 32,
        "ev-" + "A" * 32,
        "ev-" + "0" * 31 + "\n",
        "ev-" + "\N{ARABIC-INDIC DIGIT ZERO}" * 32,
    ],
    ids=ascii,
)
def test_an_id_of_another_shape_carries_no_seq(other: str) -> None:
    """Anything but the exact shape is not looked into."""
    assert seq_in_event_id(other) is None


def test_a_random_id_of_the_shape_gives_some_number() -> None:
    """The shape alone proves nothing, so a number comes back that the caller must check."""
    assert isinstance(seq_in_event_id(new_event_id()), int)
