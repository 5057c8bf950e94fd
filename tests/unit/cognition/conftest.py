"""Every store that a test makes is closed after it: from Python 3.13 on, a database that is only forgotten is a warning."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tidings.cognition.write import MemoryStore


@pytest.fixture(autouse=True)
def closed_stores(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    made: list[MemoryStore] = []
    make = MemoryStore.__init__

    def note(self: MemoryStore, *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(MemoryStore, "__init__", note)
    yield
    for store in made:
        store.close()
