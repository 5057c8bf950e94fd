"""The ledger in a world where a seed decides what happens next: callers, clients with cursors, an operator, crashes at any step."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any, Final

import pytest

from tests.simulation.book import Broken
from tests.simulation.ledger_world import LedgerSimulation
from tidings.ledger import Ledger

PER_TEST: Final = 20
PER_HEAVY_TEST: Final = 100


@pytest.fixture(autouse=True)
def _in_silence() -> Iterator[None]:
    """Lives end in the middle, and somebody logs it."""
    logging.disable(logging.CRITICAL)
    yield
    logging.disable(logging.NOTSET)


@pytest.mark.req("H9", "H13", "H14")
@pytest.mark.parametrize("first", range(0, 2 * PER_TEST, PER_TEST))
def test_a_ledger_keeps_its_promises_whatever_comes_between(first: int) -> None:
    """What was answered is there, one of two wins, no seq comes twice or is missed, and who is told finds it in the state."""
    _run(range(first, first + PER_TEST))


def test_a_ledger_opens_while_a_snapshot_of_the_one_before_takes_its_place() -> None:
    """A snapshot that is gone when it is to be read was replaced by a newer one, and that is used."""
    _run(range(1844, 1845))


@pytest.mark.heavy
@pytest.mark.timeout(900)
@pytest.mark.parametrize("first", range(1000, 1000 + 10 * PER_HEAVY_TEST, PER_HEAVY_TEST))
def test_a_ledger_keeps_its_promises_for_many_seeds(first: int) -> None:
    """The same, for many more."""
    _run(range(first, first + PER_HEAVY_TEST))


@pytest.mark.heavy
def test_a_ledger_that_tells_too_early_is_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """If happenings are published while they are being stored, somebody sees what a crash then takes back."""
    execute, publish = Ledger._execute, Ledger._publish
    published: set[int] = set()

    def hasty(self: Ledger, commit: Any, slices: Any) -> Any:
        asyncio.get_running_loop().call_soon(once, self, commit, len(commit.happenings))
        return execute(self, commit, slices)

    def once(self: Ledger, commit: Any, count: int) -> None:
        if commit.first_seq is not None and id(commit) not in published:
            published.add(id(commit))
            commits.append(commit)
            publish(self, commit, len(commit.happenings))

    commits: list[Any] = []
    monkeypatch.setattr(Ledger, "_execute", hasty)
    monkeypatch.setattr(Ledger, "_publish", once)

    with pytest.raises(Broken, match=r"seq \d+ was"):
        _run(range(200))


def _run(seeds: range) -> None:
    for seed in seeds:
        LedgerSimulation(seed).run()
