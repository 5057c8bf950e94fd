"""A node that is killed between persisting and answering: what was committed is committed once, and a retry finds it."""

from __future__ import annotations

import asyncio
import contextlib
import random
import signal
from pathlib import Path
from typing import Any, Final

import orjson
import pytest

from tests.integration.cli.support import started
from tests.integration.node_support import Client, connect, until
from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK

SECRET: Final = "a secret for the processes of these tests"
BATCH: Final = 5


def config(path: Path) -> Path:
    file = path / "node.toml"
    file.write_text(
        f'[server]\nport = 0\nlog_level = "error"\n[log]\njournal_bytes = 1048576\n'
        f'[access.tokens]\nsecret = "{SECRET}"\n[sync.schemas.note]\n'
    )
    return file


def message(type: str, payload: Any) -> bytes:
    return orjson.dumps({"type": type, "msg_id": "m", "timestamp": 0, "protocol_version": "1.0", "payload": payload})


class Submitter:
    """A client that sends each batch until it is answered, and notes what it was told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.answers: dict[str, set[tuple[int, int]]] = {}
        self.unanswered: list[str] = []
        self._count = 0

    async def join(self, url: str) -> Client:
        claims = TokenClaims(partitions=frozenset({"P1"}))
        token = TokenIssuer(TokenSettings(secret=SECRET), SYSTEM_CLOCK).issue("u", client_id=self.name, claims=claims)
        client = await connect(f"{url.replace('http', 'ws', 1)}/sync")
        payload = {"token": token, "client_id": self.name, "supported_profiles": ["canonical"]}
        await self._ask(client, message("connect", payload))
        return client

    async def run(self, url: str, batches: int | None = None) -> None:
        """Submit one batch after another, first those without an answer; end when the node does, or after so many."""
        with contextlib.suppress(OSError, ConnectionError, IndexError):
            client = await self.join(url)
            try:
                while batches is None or batches > 0 or self.unanswered:
                    batches = None if batches is None else batches - 1
                    await self._submit(client)
            finally:
                client.transport.disconnect(False)

    async def _submit(self, client: Client) -> None:
        if not self.unanswered:
            self.unanswered = [f"{self.name}-{self._count + each}" for each in range(BATCH)]
            self._count += BATCH
        event = {"type": "event", "payload": {"schema": "note", "data": {"by": self.name}}}
        items = [{"id": id, "partitions": ["P1"], "event": event} for id in self.unanswered]
        answer = await self._ask(client, message("submit_events", {"events": items}))
        for result in answer["payload"]["results"]:
            assert result["status"] == "committed"
            told = (result["committed_id"], result["status_updated_at"])
            self.answers.setdefault(result["id"], set()).add(told)
        self.unanswered = []

    async def repeat_all(self, url: str) -> None:
        """Send everything once more."""
        client = await self.join(url)
        for start in range(0, self._count, BATCH):
            self.unanswered = [f"{self.name}-{number}" for number in range(start, start + BATCH)]
            await self._submit(client)
        client.transport.disconnect(False)

    async def _ask(self, client: Client, asked: bytes) -> dict[str, Any]:
        count = len(client.heard)
        client.say(asked)
        heard = await client.hear(count + 1)
        answer: dict[str, Any] = orjson.loads(heard[count])  # IndexError: the line was cut first
        return answer


async def all_committed(url: str) -> list[dict[str, Any]]:
    """Every event of the partition, by paging."""
    reader = Submitter("reader")
    client = await reader.join(url)
    found: list[dict[str, Any]] = []
    since, has_more = 0, True
    while has_more:
        asked = {"partitions": ["P1"], "since_committed_id": since, "limit": 1000}
        page = (await reader._ask(client, message("sync", asked)))["payload"]
        found += page["events"]
        since, has_more = page["next_since_committed_id"], page["has_more"]
    client.transport.disconnect(False)
    return found


@pytest.mark.slow
@pytest.mark.req("S26", "S27", "SC13", "SC15")
@pytest.mark.parametrize("kills", [2, pytest.param(8, marks=pytest.mark.heavy)])
def test_killed_again_and_again_every_answer_stays_true(tmp_path: Path, kills: int) -> None:
    """SIGKILL at any moment while clients submit: what was answered is there at that id and time; a retry of what was not is one commit."""
    submitters = [Submitter(f"c{number}") for number in range(3)]
    chance = random.Random(4)
    file = config(tmp_path)

    async def submit_and_kill(url: str, kill: Any) -> None:
        working = [asyncio.ensure_future(each.run(url)) for each in submitters]
        before = sum(len(each.answers) for each in submitters)
        await until(lambda: sum(len(each.answers) for each in submitters) >= before + 30)
        await asyncio.sleep(chance.random() / 50)  # anywhere between sending, persisting and answering
        kill()
        await asyncio.gather(*working)

    for _ in range(kills):
        with started("serve", "-w", tmp_path / "workspace", "--config", file, "--json") as process:
            url = process.json()["url"]
            asyncio.run(submit_and_kill(url, lambda of=process.process: of.send_signal(signal.SIGKILL)))
            assert process.exit_code() == -signal.SIGKILL

    async def look(url: str) -> list[dict[str, Any]]:
        for each in submitters:
            await each.run(url, batches=0)
            await each.repeat_all(url)
        return await all_committed(url)

    with started("serve", "-w", tmp_path / "workspace", "--config", file, "--json") as process:
        events = asyncio.run(look(process.json()["url"]))

    answers = {id: told for each in submitters for id, told in each.answers.items()}
    assert all(len(told) == 1 for told in answers.values())  # a retry is told what the first was, or would have been
    stored = {each["id"]: (each["committed_id"], each["status_updated_at"]) for each in events}
    assert len(stored) == len(events)
    assert stored == {id: next(iter(told)) for id, told in answers.items()}
    assert [each["committed_id"] for each in events] == sorted(each["committed_id"] for each in events)
