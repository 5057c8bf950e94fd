"""The soak test: growth beyond the allowance is reported, and a short run loads every door."""

from __future__ import annotations

import msgspec
import pytest

from benchmarks.soak import Sample, growth, main

BEFORE = Sample(100 << 20, 40, 5, 50 << 20)


def samples(last: Sample) -> list[Sample]:
    """A node that starts small, is steady after the warm-up, and ends with ``last``."""
    return [Sample(1, 1, 1, 1)] * 5 + [BEFORE] * 12 + [last] * 3


@pytest.mark.parametrize(
    ("field", "within", "beyond"),
    [
        ("memory_bytes", 120 << 20, 130 << 20),
        ("descriptors", 57, 59),
        ("threads", 9, 10),
        ("disk_bytes", 70 << 20, 72 << 20),
    ],
)
def test_growth_beyond_the_allowance_is_reported(field: str, within: int, beyond: int) -> None:
    """Each figure may exceed its earlier median by its allowance and no more; the warm-up does not count."""
    last = dict(zip(Sample.__dataclass_fields__, msgspec.to_builtins(BEFORE).values(), strict=True))

    assert growth(samples(Sample(**{**last, field: within}))) == []
    [problem] = growth(samples(Sample(**{**last, field: beyond})))
    assert problem.startswith(f"{field} grew from")


@pytest.mark.heavy
@pytest.mark.timeout(300)
def test_a_node_stays_flat_for_two_minutes() -> None:
    """Memory, descriptors, threads and disk of a node under mixed load do not grow."""
    assert main(["--minutes", "2"]) == 0
