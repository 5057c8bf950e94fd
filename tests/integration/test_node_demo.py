"""The demo's node: tokens lie ready, what the screen suggests works, and a second run goes on where the first one was."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import socket
import subprocess
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.integration.cli.support import Process, invoke, run, started
from tidings.bus.events import Ack, ReceivedEvent
from tidings.cli.demo import PORT
from tidings.client.groups import RemoteBus
from tidings.server.address import read_address

COUNT = 40


def bring_up(process: Process) -> tuple[dict[str, Any], dict[str, str]]:
    """What the demo says once everything lies ready, and headers with its administrator's token."""
    process.json()  # the node is up
    told = process.json()
    token = Path(told["token_file"]).read_text().strip()
    return told, {"authorization": f"Bearer {token}"}


@pytest.mark.slow
def test_a_second_run_goes_on(tmp_path: Path) -> None:
    """Seqs, groups and the secret stay; a token of the first run is good in the second."""
    with started("demo", "--json", "--count", COUNT, "--port", 0, "-w", tmp_path) as process:
        first, headers = bring_up(process)
        published = httpx.post(
            f"{first['url']}/v1/events",
            headers=headers,
            json={"meta": {"topic": "household", "type": "NOTED", "space_id": "person:alice"}, "payload": {"n": 1}},
        )
        process.process.send_signal(signal.SIGINT)
        assert process.exit_code() == 0
    secret = (tmp_path / ".bus/dev/secret").read_bytes()
    with started("demo", "--json", "--count", COUNT, "--port", 0, "-w", tmp_path) as process:
        second, _ = bring_up(process)
        groups = httpx.get(f"{second['url']}/v1/groups", headers=headers)
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0

    assert published.status_code == 201
    assert second["seq"] >= first["seq"] + COUNT + 1
    assert groups.status_code == 200
    assert {group["group"] for group in groups.json()["groups"]} == {"thermostat", "errand-list"}
    assert (tmp_path / ".bus/dev/secret").read_bytes() == secret
    assert invoke("log", "verify", "--ids", "-w", tmp_path).exit_code == 0


@pytest.mark.slow
def test_the_sync_client_on_the_screen_works_as_it_stands(tmp_path: Path) -> None:
    """Pasted from the screen into a shell, twice: each time an errand is committed, and the second run sees both."""
    workspace = tmp_path / "demo"
    with started("demo", "--count", COUNT, "--port", 0, "-w", workspace) as process:
        screen: list[str] = []
        while screen.count("END") < 2:
            screen.append(process.line())
        start = max(number for number, line in enumerate(screen) if line.endswith("<<'END'"))
        pasted = "\n".join(screen[start:])
        runs = [subprocess.run(["sh", "-c", pasted], capture_output=True, text=True, timeout=60) for _ in range(2)]
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0

    secrets = [(workspace / ".bus/dev" / name).read_text().strip() for name in ("secret", "token", "alice")]
    assert not any(secret in "\n".join(screen) for secret in secrets)
    assert [each.stderr for each in runs] == ["", ""]
    assert [each.stdout.splitlines()[-1] for each in runs] == ["1 errands", "2 errands"]
    assert all(each.stdout.startswith("Committed(") for each in runs)


@pytest.mark.slow
def test_a_program_can_join_in(tmp_path: Path) -> None:
    """What the screen suggests as a program works: a group of one's own gets every reading; the tool reads beside the node."""
    with started("demo", "--json", "--count", COUNT, "--port", 0, "-w", tmp_path) as process:
        told, headers = bring_up(process)

        async def join() -> int:
            seen: list[object] = []
            enough = asyncio.Event()

            async def note(event: ReceivedEvent) -> Ack:
                seen.append(event.payload["reading"])
                if len(seen) >= COUNT * 4 // 5:
                    enough.set()
                return Ack()

            async with RemoteBus(told["url"], headers["authorization"].removeprefix("Bearer ")) as bus:
                await bus.subscribe("demo", "my-group", note)
                async with asyncio.timeout(20):
                    await enough.wait()
            return len(seen)

        count = asyncio.run(join())
        listed = run("group", "list", "--json", "-w", tmp_path)
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0

    assert count >= COUNT * 4 // 5
    assert listed.returncode == 0
    assert b"my-group" in listed.stdout


@pytest.mark.slow
def test_a_taken_port_and_a_failed_set_up_are_said_and_the_node_serves_on(tmp_path: Path) -> None:
    """The node takes another port and says so; what was to install the pipeline fails beside it, and that is one line."""
    setup = "sh -c 'echo installing; exit 3'"
    with socket.socket() as taken:
        with contextlib.suppress(OSError):  # another process has it already
            taken.bind(("127.0.0.1", PORT))
            taken.listen()
        with started("demo", "--count", 5, "-w", tmp_path, "--pipeline", "--pipeline-setup", setup) as process:
            screen = [process.line()]
            while screen[-1] != "installing":
                screen.append(process.line())
            assert process.process.stderr is not None
            said = ""
            while "exit code" not in said:
                said += process.process.stderr.readline().decode()
            address = read_address(tmp_path)
            assert address is not None
            ready = httpx.get(f"{address.url}/readyz")
            process.process.send_signal(signal.SIGTERM)
            assert process.exit_code() == 0

    assert f"port {PORT} is taken by another process" in said
    assert not address.url.endswith(f":{PORT}")
    assert "its set-up ended with exit code 3; the node keeps running" in said
    assert "Traceback" not in said
    assert ready.status_code == 200
