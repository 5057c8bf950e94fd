"""Every error of ours has the HTTP status that somebody chose for it."""

from __future__ import annotations

import importlib
from collections.abc import Iterator

import pytest

from tidings.core.errors import TidingsError
from tidings.server.edge import status_of

PACKAGES = ("core.errors", "log.errors", "bus.errors", "access.errors", "server.errors")


def errors_of(module: str) -> Iterator[type[TidingsError]]:
    found = importlib.import_module(f"tidings.{module}")
    for value in vars(found).values():
        if isinstance(value, type) and issubclass(value, TidingsError) and value.__module__ == found.__name__:
            yield value


# Two of access are raised where the command line asks a node, never in one.
ALL = [
    kind
    for module in PACKAGES
    for kind in errors_of(module)
    if issubclass(kind, TidingsError) and not kind.code.startswith("access.node_")
]


def status(kind: type[TidingsError]) -> int:
    return status_of(kind.__new__(kind))


@pytest.mark.parametrize("kind", ALL, ids=lambda kind: kind.__name__)
def test_an_error_has_a_status_that_fits(kind: type[TidingsError]) -> None:
    """A status of its own, 503 for what passes, or 500 for what a request cannot have caused."""
    found = status(kind)

    assert 400 <= found <= 599
    if kind.code.startswith(("event.", "api.", "access.")) and not kind.code.endswith(".error"):
        assert found < 500 or kind.retryable


def test_only_our_own_trouble_is_500() -> None:
    """What is answered with 500 is what no caller can do anything about; the roots are never raised."""
    assert {kind.code for kind in ALL if status(kind) == 500 and not kind.code.endswith(".error")} == {
        "bus.invalid_answer",
        "bus.invalid_handler",
        "bus.not_through_node",
        "bus.other_event_loop",
        "bus.payload_mismatch",
        "node.address_unusable",
        "node.certificate_unusable",
        "node.invalid_signal",
        "node.not_started",
        "workspace.corrupt",
        "workspace.missing",
        "workspace.unsupported_format",
        "workspace.unusable",
    }
