"""Calls to a plugin at the other end of a connection."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from tests.beyond import Beyond, crossed
from tidings.ledger.errors import PluginFailure
from tidings.steward.serving import RemoteRespondent


class Silent:
    """A connection whose plugin reads and never answers."""

    authority: Any = None
    granted: frozenset[str] = frozenset()
    served: Any = None
    is_full = False

    def __init__(self) -> None:
        self.sent: list[bytes] = []

    def hold_memory(self, size: int) -> None:
        pass

    def send(self, messages: Sequence[bytes]) -> None:
        self.sent += messages


@pytest.mark.bound("steward.settings.StewardSettings.calls_count_max")
@crossed
async def test_one_more_call_to_the_plugin_is_refused(beyond: Beyond) -> None:
    """As many calls as allowed wait for their answers; each further one is refused and not sent."""
    caller = Silent()
    respondent = RemoteRespondent("org.example.player", caller, 3)
    waiting = [asyncio.ensure_future(respondent.call(kind="request", shelf="audio.playback")) for _ in range(3)]
    await asyncio.sleep(0)
    for _ in range(3, beyond(3)):
        with pytest.raises(PluginFailure, match="not answered"):
            await respondent.call(kind="request", shelf="audio.playback")
    assert len(caller.sent) == 3
    waiting[0].cancel()
    await asyncio.gather(waiting[0], return_exceptions=True)
    again = asyncio.ensure_future(respondent.call(kind="request", shelf="audio.playback"))
    await asyncio.sleep(0)
    assert len(caller.sent) >= 4
    respondent.gone()
    await asyncio.gather(*waiting, again, return_exceptions=True)
