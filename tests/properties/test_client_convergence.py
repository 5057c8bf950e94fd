"""
Three clients and a server that commits, cuts, forgets to answer, reorders and delays, in any sequence: all converge.

Each step is drawn by Hypothesis. At the end the faults stop, and then: every draft that was taken is committed exactly once
or in quarantine, and every client shows the server's history in the server's order.
"""

from __future__ import annotations

import asyncio
import random
import shutil
import tempfile
from collections.abc import Coroutine
from pathlib import Path
from typing import Any, Final

import msgspec
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.unit.client.support import ModelServer, Network, numbers
from tidings.client import ClientSettings, ClientStore, State, SyncClient
from tidings.testing import VirtualClock

CLIENTS: Final = 3
PARTITIONS: Final = ("P1", "P2")
SETTINGS: Final = ClientSettings(
    page_events=3,
    batch_events_max=3,
    refresh_events=5,
    buffer_events_max=4,
    snapshot_events=4,
    cursor_gap_max=2,
    heartbeat_s=5,
    silence_s_max=12,
    answer_s_max=12,
    retry_s_min=0.1,
    retry_s_max=2,
)
POISON: Final = 7
"""Drafts whose number is divisible by this are rejected."""

which = st.integers(0, CLIENTS - 1)


class Device:
    """One client, with its store and its own line to the server."""

    def __init__(self, number: int, folder: Path, server: ModelServer) -> None:
        self.number = number
        self.folder = folder
        self.server = server
        self.lives = 0
        self.path = folder / f"{number}.db"
        self.network = Network(server)
        self.client: SyncClient[list[int]]

    def make(self, clock: VirtualClock) -> SyncClient[list[int]]:
        self.lives += 1
        self.client = SyncClient(
            "ws://server/sync",
            token="token",
            client_id=f"client-{self.number}",
            store=ClientStore(self.path, is_inline=True),
            partitions=PARTITIONS,
            view=numbers(),
            settings=SETTINGS,
            connector=self.network,
            clock=clock,
            rng=random.Random(self.number * 100 + self.lives),
        )
        return self.client

    def copy_of_files(self) -> Path:
        """What a kill at this moment would leave."""
        copied = self.folder / f"{self.number}-{self.lives}.db"
        shutil.copyfile(self.path, copied)
        tail = Path(f"{self.path}-wal")
        if tail.exists():
            shutil.copyfile(tail, f"{copied}-wal")
        return copied


class Convergence(RuleBasedStateMachine):
    """Devices, and everything that happens to them."""

    def __init__(self) -> None:
        super().__init__()
        self.loop = asyncio.new_event_loop()
        self.folder = Path(tempfile.mkdtemp(prefix="tidings-client-"))
        self.clock = VirtualClock()
        self.server = ModelServer()
        self.server.reject = lambda item: (
            ("validation_failed", []) if number_in(bytes(item.event)) % POISON == 0 else None
        )
        self.next_number = 1
        self.taken: dict[str, int] = {}
        self.devices: list[Device] = []

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> Any:
        return self.loop.run_until_complete(coroutine)

    @initialize()
    def start(self) -> None:
        self.devices = [Device(number, self.folder, self.server) for number in range(CLIENTS)]
        for device in self.devices:
            self.run(device.make(self.clock).__aenter__())

    def new_number(self) -> int:
        self.next_number += 1
        return self.next_number

    @rule(at=which, partition=st.sampled_from(PARTITIONS), both=st.booleans())
    def submit(self, at: int, partition: str, both: bool) -> None:
        number = self.new_number()
        names = PARTITIONS if both else (partition,)
        draft = self.run(self.devices[at].client.submit(names, "noted", {"n": number}))
        self.taken[draft.id] = number

    @rule(partition=st.sampled_from(PARTITIONS))
    def commit_elsewhere(self, partition: str) -> None:
        self.server.commit(partitions=[partition], payload={"n": self.new_number()})

    @rule(seconds=st.sampled_from([0.0, 0.1, 1.0, 15.0]))
    def pass_time(self, seconds: float) -> None:
        self.run(self.clock.advance(seconds))

    @rule()
    def cut_all(self) -> None:
        self.run(self._cut())

    async def _cut(self) -> None:
        self.server.cut()

    @rule(at=which)
    def toggle_network(self, at: int) -> None:
        device = self.devices[at]
        device.network.is_up = not device.network.is_up

    @rule(count=st.integers(1, 2))
    def lose_answers(self, count: int) -> None:
        self.server.lose_results = count

    @rule()
    def lose_a_request(self) -> None:
        self.server.lose_requests = 1

    @rule()
    def limit_the_rate(self) -> None:
        self.server.rate_limits = 1

    @rule()
    def hold_broadcasts(self) -> None:
        if self.server.held is None:
            self.server.held = []

    @rule(seed=st.integers(0, 1000))
    def release_broadcasts_shuffled(self, seed: int) -> None:
        self.run(self._release(random.Random(seed)))

    async def _release(self, rng: random.Random) -> None:
        self.server.tell_held(lambda held: rng.sample(held, len(held)))

    @rule(is_silent=st.booleans())
    def fall_silent(self, is_silent: bool) -> None:
        self.server.is_silent = is_silent

    @rule(at=which)
    def restart(self, at: int) -> None:
        device = self.devices[at]
        self.run(device.client.__aexit__(None, None, None))
        self.run(device.make(self.clock).__aenter__())

    @rule(at=which)
    def kill(self, at: int) -> None:
        device = self.devices[at]
        left = device.copy_of_files()
        self.run(device.client.__aexit__(None, None, None))
        device.path = left
        self.run(device.make(self.clock).__aenter__())

    @rule(at=which)
    def prune(self, at: int) -> None:
        self.run(self.devices[at].client.prune())

    @invariant()
    def views_hold_nothing_twice(self) -> None:
        for device in self.devices:
            view = device.client.view
            assert len(view) == len(set(view))

    @invariant()
    def nothing_is_committed_twice(self) -> None:
        assert len({event.id for event in self.server.events}) == len(self.server.events)

    def teardown(self) -> None:
        try:
            if self.devices:
                self.run(self._heal_and_check())
                for device in self.devices:
                    self.run(device.client.__aexit__(None, None, None))
        finally:
            self.loop.close()
            shutil.rmtree(self.folder)

    async def _heal_and_check(self) -> None:
        server = self.server
        server.is_silent = False
        server.lose_results = server.lose_requests = server.rate_limits = 0
        server.tell_held()
        for device in self.devices:
            device.network.is_up = True
        history: list[int] = []
        for _ in range(400):
            await self.clock.advance(0.5)
            history = [number_in(bytes(event.event)) for event in server.events]
            if all(
                device.client.status.state is State.LIVE
                and device.client.status.pending_count == 0
                and device.client.view == history
                for device in self.devices
            ):
                break
        for device in self.devices:
            assert device.client.status.state is State.LIVE
            assert device.client.status.pending_count == 0
            assert device.client.view == history
        quarantined = {kept.event.id for device in self.devices for kept in await device.client.quarantine()}
        committed = {event.id for event in server.events}
        assert not quarantined & committed
        assert {id for id, number in self.taken.items() if number % POISON == 0} <= quarantined
        assert {id for id, number in self.taken.items() if number % POISON} <= committed


def number_in(event: bytes) -> int:
    number: int = msgspec.json.decode(event)["payload"]["n"]
    return number


TestConvergence = pytest.mark.slow(Convergence.TestCase)
