"""Dead letters of encrypted spaces: what they say is sealed, and what they need stays in the log."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final

import pytest
from typer.testing import Result

from tests.integration.cli.support import invoke
from tests.scenarios.bus.support import TOPIC, World, soon
from tidings.bus import EventBus
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.keys import KeyFile
from tidings.log.settings import LogSettings
from tidings.types import Ack

SETTINGS: Final = LogSettings(journal_bytes=1 << 20, journal_count_max=2, segment_lines_max=4)


@pytest.fixture
def key_file(tmp_path: Path) -> Path:
    """Keys for one space."""
    path = tmp_path / "keys.json"
    for command in (("create", path), ("add", path, "shared:home")):
        done = invoke("key", *command)
        assert done.exit_code == 0, done.stderr
    return path


class Failing:
    """A handler that quotes what it cannot handle, until it is mended."""

    def __init__(self) -> None:
        self.is_mended = False
        self.got: list[Any] = []

    async def __call__(self, event: Any) -> Ack:
        """Fail at offset 1, as a validator does: with the value in the text."""
        if event.offset == 1 and not self.is_mended:
            try:
                int(event.payload["secret"])
            except ValueError as error:
                raise LookupError(f"cannot use {event.payload['secret']!r}") from error
        self.got.append(event.payload)
        return Ack()


async def fail_once(workspace: Path, encryptor: AesGcmEncryptor) -> None:
    """Publish events, one of which ends as a dead letter that was tried again in vain."""
    world = World()
    async with EventBus(workspace=workspace, encryptor=encryptor, log_settings=SETTINGS) as bus:
        await bus.subscribe(TOPIC, "g", Failing(), max_retries=1, backoff_base=0.0)
        await bus.publish_many([world.event(n, payload={"n": n, "secret": "swordfish"}) for n in range(12)])
        await soon(lambda: bus.lag(TOPIC, "g") == 0)
        await bus.redrive(TOPIC)
        async with asyncio.timeout(20):
            while not [each for each in await bus.dead_letters(TOPIC) if each.state == "dead" and each.redrives]:  # noqa: ASYNC110
                await asyncio.sleep(0)


async def cli(*args: object) -> Result:
    """Run a command beside the test's own loop."""
    return await asyncio.to_thread(invoke, *args)


async def test_the_error_of_a_sealed_letter_is_for_those_with_the_key(
    tmp_path: Path, key_file: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Neither the process's log nor a file of the workspace quotes the payload; the bus and the tool show the error to whoever has the key."""
    encryptor = AesGcmEncryptor(KeyFile(key_file))
    await fail_once(tmp_path / "w", encryptor)

    assert "LookupError" in caplog.text
    assert "swordfish" not in caplog.text
    for path in (tmp_path / "w").rglob("*"):
        assert not path.is_file() or b"swordfish" not in path.read_bytes(), path
    async with EventBus(workspace=tmp_path / "w", encryptor=encryptor) as bus:
        (letter,) = await bus.dead_letters(TOPIC, error_contains="swordfish")
        assert {attempt.error for attempt in letter.attempts} == {letter.error} == {"cannot use 'swordfish'"}
        assert len(letter.attempts) == 3
        assert "LookupError: cannot use 'swordfish'" in letter.traceback
    shown = await cli("dlq", "show", TOPIC, letter.id, "--json", "--key-file", key_file, "-w", tmp_path / "w")
    assert json.loads(shown.stdout)["error"] == "cannot use 'swordfish'"
    shown = await cli("dlq", "show", TOPIC, letter.id, "--key-file", key_file, "-w", tmp_path / "w")
    assert "Traceback (most recent call last)" in shown.stdout
    for command in (("dlq", "show", TOPIC, letter.id), ("dlq", "list")):
        without = await cli(*command, "--json", "-w", tmp_path / "w")
        assert without.exit_code == 0
        assert "not at hand" in without.stdout
        assert "builtins.LookupError" in without.stdout
        assert "swordfish" not in without.stdout


@pytest.mark.req("F134")
async def test_what_a_sealed_letter_needs_stays_until_it_is_done_with(tmp_path: Path, key_file: Path) -> None:
    """Compaction and the tool's retention keep the event for as long as the letter can be tried again, and say why."""
    encryptor = AesGcmEncryptor(KeyFile(key_file))
    await fail_once(tmp_path / "w", encryptor)
    retention = ("log", "retention", "--max-bytes", f"{TOPIC}=1", "--json", "-w", tmp_path / "w")

    planned = json.loads((await cli(*retention, "--yes")).stdout)
    assert planned["segments"] == 0
    assert planned["decisions"][0]["reason"] == "dead letter 'g-1' needs its event"
    async with EventBus(workspace=tmp_path / "w", encryptor=encryptor, log_settings=SETTINGS) as bus:
        mended = Failing()
        mended.is_mended = True
        assert (await bus.compact()).drops == ()
        await bus.subscribe(TOPIC, "g", mended)
        await bus.redrive(TOPIC)
        await soon(lambda: bool(mended.got))
        assert mended.got == [{"n": 1, "secret": "swordfish"}]
        async with asyncio.timeout(20):
            while await bus.dead_letters(TOPIC):  # noqa: ASYNC110
                await asyncio.sleep(0)
        assert [drop.segment.number for drop in (await bus.compact()).drops] == [1, 2]
