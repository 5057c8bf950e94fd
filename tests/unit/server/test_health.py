"""Readiness is decided on plain values, and each reason can be matched."""

from __future__ import annotations

from typing import Any

import pytest

from tidings.log.interface import Health
from tidings.server.monitoring import readiness_of

GOOD = Health(is_writable=True, is_durable=True)


def codes(log: Health = GOOD, phase: str = "running", **state: Any) -> tuple[bool, list[str], list[str]]:
    found = readiness_of(phase, log, **{"seq": 10, "dispatched_seq": 10, "lag_max": 5, **state})
    return found.is_ready, [each.code for each in found.reasons], [each.code for each in found.warnings]


@pytest.mark.parametrize(
    ("state", "reasons"),
    [
        ({}, []),
        ({"phase": "starting"}, ["node.starting"]),
        ({"phase": "stopping"}, ["node.stopping"]),
        ({"log": Health(is_writable=False, is_durable=True, problem="x")}, ["log.fenced"]),
        ({"log": Health(is_writable=False, is_durable=True, is_storage_full=True)}, ["log.storage_full"]),
        ({"dispatched_seq": 5}, []),
        ({"dispatched_seq": 4}, ["node.dispatcher_lag"]),
        ({"problems": ["/sync: failed"]}, ["node.listener_failed"]),
        ({"problems": ["x"], "has_dispatcher_stopped": True}, ["node.dispatcher_stopped"]),
        ({"phase": "stopping", "dispatched_seq": 0}, ["node.stopping", "node.dispatcher_lag"]),
    ],
)
def test_reasons(state: dict[str, Any], reasons: list[str]) -> None:
    """Ready means no reason against it; several reasons are all named."""
    assert codes(**state) == (not reasons, reasons, [])


def test_warnings_do_not_make_it_unready() -> None:
    """A log that is not durable, or a group that stands still, is told and served all the same."""
    log = Health(is_writable=True, is_durable=False)

    assert codes(log, bus_problem="group 'g' of topic 't': x") == (True, [], ["log.not_durable", "bus.stalled"])
