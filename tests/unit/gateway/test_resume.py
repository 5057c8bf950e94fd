"""Resume tokens are issued here and nowhere else, and lead to what is still kept."""

from __future__ import annotations

import hmac
import os
from base64 import urlsafe_b64decode, urlsafe_b64encode

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.unit.gateway.engines import Engines, graph_event, system_event
from tidings.gateway.names import EventClass
from tidings.gateway.resume_index import ResumeIndex, Retained
from tidings.gateway.resume_tokens import KeyedHash, ResumeTokens, claimed_point

ID = bytes(range(16))
TOKEN = ResumeTokens(bytes(32)).issue(EventClass.NETWORK, ID, 2**53 - 1, 1_700_000_000_000)


def retained(engines: Engines, *seqs: int) -> list[Retained]:
    """Graph envelopes that wait for delivery."""
    for seq in seqs:
        engines.tell(graph_event(seq))
    return [each.retained for each in engines.normalize()]


def test_a_token_is_read_back_by_its_issuer_alone() -> None:
    """88 characters of base64url; another life's key reads nothing of it, though what it claims is legible."""
    tokens = ResumeTokens(bytes(32))
    point = (EventClass.NETWORK, ID.hex(), 2**53 - 1, 1_700_000_000_000)

    assert len(TOKEN) == 88
    assert tokens.read(TOKEN) == point
    assert ResumeTokens(os.urandom(32)).read(TOKEN) is None
    assert claimed_point(TOKEN) == point
    with pytest.raises(ValueError, match="32 bytes"):
        ResumeTokens(b"short")


def test_a_token_with_any_byte_changed_is_none() -> None:
    """Every bit of it counts."""
    tokens = ResumeTokens(bytes(32))
    raw = urlsafe_b64decode(TOKEN)
    for place in range(len(raw)):
        for bit in (1, 0x80):
            changed = bytearray(raw)
            changed[place] ^= bit
            assert tokens.read(urlsafe_b64encode(changed).decode()) is None


@given(
    st.one_of(
        st.text(max_size=120),
        st.text("ABCabc019-_", min_size=88, max_size=88),
        st.just(TOKEN + "A"),
        st.just(TOKEN[:-1]),
    )
)
def test_text_that_was_never_issued_is_no_token(text: str) -> None:
    """Whatever it is, reading it fails quietly."""
    assert ResumeTokens(bytes(32)).read(text) is None


@pytest.mark.parametrize(
    "text",
    [
        "",
        TOKEN[:-4] + "====",
        TOKEN.replace("A", "\u0391", 1),
        TOKEN + "\n",
        " " + TOKEN[1:],
        "+" + TOKEN[1:],
        "/" * 88,
    ],
)
def test_another_spelling_of_a_token_is_none(text: str) -> None:
    """There is one text for each token."""
    assert ResumeTokens(bytes(32)).read(text) is None
    assert ResumeTokens(bytes(32)).read(TOKEN) is not None


def test_a_token_of_an_unknown_version_or_class_is_none() -> None:
    """Even if its hash is right."""
    key = bytes(32)
    for head in (b"\x02\x01", b"\x01\x00", b"\x01\x09"):
        body = head + urlsafe_b64decode(TOKEN)[2:34]
        token = urlsafe_b64encode(body + hmac.digest(key, body, "sha256")).decode()
        assert (ResumeTokens(key).read(token), claimed_point(token)) == (None, None)


@given(st.binary(min_size=32, max_size=32), st.binary(max_size=300))
def test_the_keyed_hash_is_hmac_sha_256(key: bytes, message: bytes) -> None:
    """As the standard library makes it."""
    assert KeyedHash(key).digest(message) == hmac.digest(key, message, "sha256")


@pytest.mark.req("R237")
def test_so_many_of_each_class_are_kept_once_they_were_delivered() -> None:
    """The oldest leaves when there are more; what waits is not counted; a smaller window takes effect at once."""
    engines = Engines(window=3)
    made = retained(engines, 1, 2, 3, 4, 5)
    assert len(engines.index) == 5
    assert [engines.index.number(each) for each in made] == [1, 2, 3, 4, 5]
    engines.tell(system_event(1))
    (system,) = (each.retained for each in engines.normalize())
    engines.index.number(system)

    assert [each.anchor for each in engines.index.after(EventClass.GRAPH, 0)] == [3, 4, 5]
    assert [each.anchor for each in engines.index.after(EventClass.GRAPH, 4)] == [5]
    assert [engines.index.evicted_ordinal(each) for each in (EventClass.GRAPH, EventClass.SYSTEM)] == [2, 0]
    assert engines.index.find(made[1].envelope.event_id, 2) is None
    assert engines.index.find(made[2].envelope.event_id, 3) is made[2]

    engines.index.resize(1)
    assert [each.anchor for each in engines.index.after(EventClass.GRAPH, 0)] == [5]
    assert (engines.index.evicted_ordinal(EventClass.GRAPH), len(engines.index)) == (4, 2)
    engines.index.clear()
    assert (
        len(engines.index),
        engines.index.after(EventClass.GRAPH, 0),
        engines.index.evicted_ordinal(EventClass.SYSTEM),
    ) == (0, [], 6)


def test_what_is_not_delivered_is_forgotten() -> None:
    """An envelope that was shed, or that nobody may see, leaves no trace in the index."""
    engines = Engines()
    first, second = retained(engines, 1, 2)
    engines.index.forget(first)
    engines.index.number(second)

    assert len(engines.index) == 1
    assert engines.index.find(first.envelope.event_id, 1) is None


@given(st.integers(1, 8), st.lists(st.tuples(st.sampled_from(EventClass), st.booleans()), max_size=60))
def test_the_index_agrees_with_a_list_of_everything(window: int, steps: list[tuple[EventClass, bool]]) -> None:
    """Whatever mix of classes is delivered or given up, the last ones of each class are kept, in order, and nothing else."""
    engines = Engines()
    (pattern,) = retained(engines, 1)
    index = ResumeIndex(window)
    delivered: dict[EventClass, list[Retained]] = {each: [] for each in EventClass}
    for number, (event_class, is_delivered) in enumerate(steps):
        each = Retained(
            event_class, str(event_class), msgspec.structs.replace(pattern.envelope, event_id=f"{number:032x}"), number
        )
        index.add(each)
        if is_delivered:
            index.number(each)
            delivered[event_class].append(each)
        else:
            index.forget(each)

    for event_class, all_of_it in delivered.items():
        kept, gone = all_of_it[-window:], all_of_it[:-window]
        assert index.after(event_class, 0) == kept
        assert index.evicted_ordinal(event_class) == (gone[-1].ordinal if gone else 0)
        assert all(index.find(each.envelope.event_id, each.anchor) is each for each in kept)
        assert all(index.find(each.envelope.event_id, each.anchor) is None for each in gone)
    assert len(index) == sum(min(window, len(each)) for each in delivered.values())
