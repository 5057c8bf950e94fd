"""A node as a process: what it acknowledged survives its stop and its death, and signals do what they should."""

from __future__ import annotations

import asyncio
import json
import signal
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cli.support import Process, environment, invoke, lines, run, started
from tests.integration.node_support import until, until_answered
from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK

SECRET = "a secret for the processes of these tests"
OTHER_SECRET = "another secret for the processes of these tests"


def config(path: Path, *, secret: str = SECRET, more: str = "") -> Path:
    """A configuration file for a node in a test."""
    file = path / "node.toml"
    file.write_text(
        f'[server]\nport = 0\nstop_deadline_s = 10\n{more}\n[log]\njournal_bytes = 1048576\n[access.tokens]\nsecret = "{secret}"\n'
    )
    return file


def headers(secret: str = SECRET) -> dict[str, str]:
    issuer = TokenIssuer(TokenSettings(secret=secret), SYSTEM_CLOCK)
    return {"authorization": "Bearer " + issuer.issue("root", claims=TokenClaims(roles=frozenset({"admin"})))}


def item(event_id: str) -> dict[str, Any]:
    meta = {"topic": "demo", "type": "NOTED", "space_id": "shared:home", "event_id": event_id}
    return {"meta": meta, "payload": {"id": event_id}}


async def publish_until_it_ends(url: str, name: str, acknowledged: list[str]) -> None:
    """Publish one event after another; note those that were acknowledged; end when the node does."""
    async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=10) as client:
        number = 0
        while True:
            event_id = f"{name}-{number}"
            try:
                answer = await client.post("/v1/events", json=item(event_id))
            except httpx.TransportError:
                return
            if not answer.is_success:
                assert answer.status_code == 503, answer.text
                return
            acknowledged.append(event_id)
            number += 1


def stored_ids(workspace: Path) -> list[str]:
    return [line["meta"]["event_id"] for line in lines(invoke("log", "read", "demo", "--json", "-w", workspace).stdout)]


def publish_and_signal(process: Process, url: str, number: signal.Signals) -> list[str]:
    """Publish from several clients, send the signal in the midst of it, and say what was acknowledged."""
    acknowledged: list[str] = []

    async def work() -> None:
        publishers = [asyncio.ensure_future(publish_until_it_ends(url, f"p{each}", acknowledged)) for each in range(8)]
        await until(lambda: len(acknowledged) >= 100 or any(each.done() for each in publishers))
        process.process.send_signal(number)
        await asyncio.gather(*publishers)

    asyncio.run(work())
    return acknowledged


@pytest.mark.slow
@pytest.mark.parametrize(
    "number", [signal.SIGTERM, pytest.param(signal.SIGINT, marks=pytest.mark.heavy), signal.SIGKILL]
)
def test_nothing_acknowledged_is_lost(tmp_path: Path, number: signal.Signals) -> None:
    """Whether it is told to stop or killed in the midst of publishing: each acknowledged event is in the log, once."""
    with started("serve", "-w", tmp_path, "--config", config(tmp_path), "--json") as process:
        url = process.json()["url"]
        acknowledged = publish_and_signal(process, url, number)
        code = process.exit_code()

    found = stored_ids(tmp_path)
    assert code == (-signal.SIGKILL if number == signal.SIGKILL else 0)
    assert set(acknowledged) <= set(found)
    assert len(found) == len(set(found))
    assert invoke("log", "verify", "--ids", "-w", tmp_path).exit_code == 0
    assert (tmp_path / ".bus" / "node.json").exists() is (number == signal.SIGKILL)


@pytest.mark.slow
def test_a_request_under_way_is_finished(tmp_path: Path) -> None:
    """A request whose body is still on its way when the node is told to stop is answered; new connections are not taken."""
    with started("serve", "-w", tmp_path, "--config", config(tmp_path), "--json") as process:
        url = process.json()["url"]

        async def body() -> AsyncIterator[bytes]:
            content = json.dumps(item("late")).encode()
            yield content[:10]
            process.process.send_signal(signal.SIGTERM)
            await until_refused(url)
            yield content[10:]

        async def work() -> httpx.Response:
            async with httpx.AsyncClient(base_url=url, headers=headers(), timeout=30) as client:
                return await client.post("/v1/events", content=body(), headers={"content-type": "application/json"})

        answer = asyncio.run(work())
        assert process.exit_code() == 0

    assert answer.is_success
    assert stored_ids(tmp_path) == ["late"]


async def until_refused(url: str) -> None:
    """Wait until nobody listens any more."""
    host, _, port = url.removeprefix("http://").partition(":")
    async with asyncio.timeout(20):
        while True:
            try:
                _, writer = await asyncio.open_connection(host, int(port))
            except ConnectionRefusedError:
                return
            writer.close()
            await asyncio.sleep(0.01)


@pytest.mark.slow
def test_sighup_reloads_and_says_what_needs_a_restart(tmp_path: Path) -> None:
    """New secret and level hold after SIGHUP without a restart; a new port is named; a broken file changes nothing."""
    file = config(tmp_path)
    with started("serve", "-w", tmp_path, "--config", file, "--json") as process:
        url = process.json()["url"]

        async def status(secret: str) -> int:
            async with httpx.AsyncClient(base_url=url) as client:
                return (await client.get("/v1/whoami", headers=headers(secret))).status_code

        async def reload(wanted: dict[str, int]) -> None:
            async def statuses() -> dict[str, int]:
                return {secret: await status(secret) for secret in wanted}

            process.process.send_signal(signal.SIGHUP)
            await until_answered(statuses, wanted)

        config(tmp_path, secret=OTHER_SECRET, more="requests_max = 7")
        asyncio.run(reload({SECRET: 401, OTHER_SECRET: 200}))
        file.write_text("[server]\nprot = 3\n")
        asyncio.run(reload({SECRET: 401, OTHER_SECRET: 200}))
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        said = process.errors()

    assert "changed access.tokens.secret" in said
    assert "these need a restart: server.requests_max" in said
    assert "nothing was changed: setting server.prot: no such setting; did you mean 'port'?" in said
    assert SECRET not in said
    assert OTHER_SECRET not in said


@pytest.mark.slow
def test_a_second_signal_does_not_wait(tmp_path: Path) -> None:
    """While the node waits out its drain delay, a second signal ends it at once."""
    file = config(tmp_path, more="drain_delay_s = 60\n")
    file.write_text(file.read_text().replace("stop_deadline_s = 10", "stop_deadline_s = 120"))
    with started("serve", "-w", tmp_path, "--config", file, "--json") as process:
        url = process.json()["url"]

        async def work() -> None:
            async with httpx.AsyncClient(base_url=url) as client:

                async def readiness() -> int:
                    return (await client.get("/readyz")).status_code

                process.process.send_signal(signal.SIGTERM)
                await until_answered(readiness, 503)
            process.process.send_signal(signal.SIGTERM)

        asyncio.run(work())
        assert process.exit_code() == 0


@pytest.mark.slow
def test_the_start_says_what_is_exposed(tmp_path: Path) -> None:
    """Address, endpoints, tokens and durability are on stderr before the first request, and no secret is."""
    with started(
        "serve", "-w", tmp_path, "--config", config(tmp_path, more='log_format = "json"'), "--json"
    ) as process:
        url = process.json()["url"]
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        said = process.errors()

    messages = [json.loads(line)["message"] for line in said.splitlines()]
    assert f"serves {url} (no TLS, this machine only); tokens by a shared secret" in messages[0]
    assert "on disk before it is acknowledged" in messages[0]
    assert "/sync" in messages[1]
    assert SECRET not in said


def test_what_cannot_start_says_why(tmp_path: Path) -> None:
    """A misspelt key, a port in use: one sentence, a hint where there is one, and the right exit code."""
    bad = tmp_path / "bad.toml"
    bad.write_text("[server]\nconection_max = 3\n")
    misspelt = run("serve", "-w", tmp_path / "w", "--config", bad)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        busy = run("serve", "-w", tmp_path / "w", "--port", taken.getsockname()[1])

    assert misspelt.returncode == 2
    assert b"server.conection_max: no such setting; did you mean 'connections_max'?" in misspelt.stderr
    assert busy.returncode == 1
    assert b"is in use by another process" in busy.stderr
    assert b"hint: choose another port (--port" in busy.stderr


def test_settings_can_be_shown(tmp_path: Path) -> None:
    """``--print-settings`` shows what would hold, as TOML or JSON, without secrets, and starts nothing."""
    file = config(tmp_path, more="connections_max = 77")
    as_text = invoke("serve", "-w", tmp_path / "w", "--config", file, "--print-settings", "--port", 9)
    as_json = invoke("serve", "-w", tmp_path / "w", "--config", file, "--print-settings", "--json")

    assert "connections_max = 77" in as_text.stdout
    assert "port = 9" in as_text.stdout
    assert json.loads(as_json.stdout)["access"]["tokens"]["secret"] == "<secret>"
    assert SECRET not in as_text.stdout + as_json.stdout
    assert not (tmp_path / "w").exists()
    assert "TIDINGS_SERVER__PORT" not in environment()
