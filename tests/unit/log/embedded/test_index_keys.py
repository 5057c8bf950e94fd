"""The keys of the index that compiled code makes are those that Python makes."""

from __future__ import annotations

import shutil
import sysconfig
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tidings.log.embedded.index import (
    OFFSET_MAX,
    SEQ_MAX,
    IndexEntry,
    IndexLimit,
    collect_keys,
    collect_keys_py,
    fingerprint,
    fingerprint_py,
)

TEXTS = st.text(max_size=200)
ENTRIES = st.builds(
    IndexEntry,
    seq=st.integers(1, SEQ_MAX),
    topic=st.sampled_from(["a", "b", "unknown"]),
    offset=st.integers(0, OFFSET_MAX),
    event_id=st.none() | TEXTS,
    idem_key=st.none() | TEXTS,
    space_id=st.sampled_from(["home", "büro"]),
    partitions=st.lists(st.sampled_from(["p", "q"]), max_size=2).map(tuple),
)


def test_where_there_is_a_compiler_it_was_used() -> None:
    """A build that fails in silence would cost much of the speed, and nobody would know."""
    has_compiler = shutil.which("cc") is not None and Path(sysconfig.get_path("include"), "Python.h").exists()

    assert collect_keys is not collect_keys_py or not has_compiler


@given(st.binary(max_size=150), TEXTS)
@example(b"", "")
@example(b"x" * 64, "y" * 64)
@example(b"x" * 64, "y" * 65)
@example(b"", "\ud800")
def test_a_fingerprint_is_eight_bytes_of_blake2b(scope: bytes, text: str) -> None:
    """Of any text, short or long, whether or not it can be encoded."""
    expected = blake2b(scope + text.encode("utf-8", "surrogatepass"), digest_size=8).digest()

    assert fingerprint(scope, text) == fingerprint_py(scope, text) == expected


@given(st.lists(ENTRIES, max_size=20))
def test_both_ways_collect_the_same_keys(entries: list[IndexEntry]) -> None:
    """Ids, keys and partitions with their places; entries of a topic without a number are left out by both."""
    numbers = {"a": 0, "b": (1 << 24) - 1}
    results = []
    for collect in (collect_keys, collect_keys_py):
        ids: list[list[bytes]] = [[] for _ in range(256)]
        idem: list[list[bytes]] = [[] for _ in range(256)]
        partitions: dict[str, list[bytes]] = {}
        collect(entries, numbers, ids, idem, partitions)
        results.append((ids, idem, partitions))

    assert results[0] == results[1]


@pytest.mark.parametrize(
    ("seq", "offset"), [(0, 0), (-1, 0), (SEQ_MAX + 1, 0), (1, -1), (1, OFFSET_MAX + 1), (1, 1 << 70)]
)
def test_both_ways_refuse_the_same_places(seq: int, offset: int) -> None:
    """A place that does not fit the format is refused by both."""
    for collect in (collect_keys, collect_keys_py):
        with pytest.raises(IndexLimit):
            collect([IndexEntry(seq, "a", offset, None, None, "home", ())], {"a": 0}, [], [], {})
