"""A node to try things with: `serve --dev` makes its own keys, says what to paste, and is for one machine only."""

from __future__ import annotations

import os
import shutil
import signal
import stat
import subprocess
from pathlib import Path

import httpx
import msgspec
import pytest

from tests.integration.cli.support import invoke, lines, started
from tidings.server.address import NodeAddress, publish_address, read_address, read_token


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("curl") is None, reason="there is no curl")
def test_what_is_printed_can_be_pasted_and_a_second_start_goes_on(tmp_path: Path) -> None:
    """The lines publish an event and read it; after a restart the secret is the same, and a token of the first start is good."""
    screen: list[str] = []
    with started("serve", "--dev", "--port", 0, "-w", tmp_path) as process:
        while "log tail" not in "".join(screen):
            screen.append(process.line())
        pasted = screen[screen.index("Paste into another window, in this folder:") + 2 :]
        again = invoke("serve", "--dev", "--port", 0, "-w", tmp_path)
        answers = subprocess.run(["sh", "-ec", "\n".join(pasted[:-1])], capture_output=True, text=True, check=True)
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0
        said = "\n".join(screen) + process.errors()
    folder = tmp_path / ".bus/dev"
    secret, token = ((folder / name).read_text().strip() for name in ("secret", "token"))
    with started("serve", "--dev", "--port", 0, "-w", tmp_path, "--json") as process:
        told = process.json()
        who = httpx.get(f"{told['url']}/v1/whoami", headers={"authorization": f"Bearer {token}"})
        ready = httpx.get(f"{told['url']}/readyz")
        found = read_token(tmp_path)
        process.process.send_signal(signal.SIGTERM)
        assert process.exit_code() == 0

    assert '"number":1' in answers.stdout
    assert (again.exit_code, "a node serves it at http://127.0.0.1" in again.stderr) == (4, True)
    assert pasted[-1].endswith(f"log tail -w {tmp_path}")
    assert "Not for other machines" in said
    assert secret not in said
    assert token not in said
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / "secret", folder / "token")] == [
        0o700,
        0o600,
        0o600,
    ]
    assert (who.status_code, ready.status_code) == (200, 200)
    assert (folder / "secret").read_text().strip() == secret
    assert found == Path(told["token_file"]).read_text().strip()
    assert read_token(tmp_path) is None  # it has stopped
    assert invoke("log", "verify", "-w", tmp_path).exit_code == 0


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "node.example", "::"])
def test_it_is_for_this_machine_only(tmp_path: Path, host: str) -> None:
    """An address that others can reach is refused before anything is made, wherever it was set."""
    by_option = invoke("serve", "--dev", "--host", host, "-w", tmp_path / "w")
    by_setting = invoke("serve", "--dev", "-w", tmp_path / "w", env={"TIDINGS_SERVER__HOST": host})

    for each in (by_option, by_setting):
        assert each.exit_code == 2
        assert f"{host} can be reached from others" in each.stderr
    assert not (tmp_path / "w").exists()


def test_a_token_is_read_from_the_workspace_of_a_running_dev_node_only(tmp_path: Path) -> None:
    """A node that is none to try things with has no token for the tool, and a link to a file elsewhere is not followed."""
    folder = tmp_path / "w/.bus/dev"
    folder.mkdir(parents=True)
    token = folder / "token"
    token.write_text("mine\n")
    address = NodeAddress("http://127.0.0.1:1", os.getpid(), is_dev=True)

    def found() -> str | None:
        return read_token(tmp_path / "w")

    assert found() is None
    publish_address(tmp_path / "w", msgspec.structs.replace(address, is_dev=False))
    assert found() is None
    publish_address(tmp_path / "w", address)
    assert read_address(tmp_path / "w") == address
    assert found() == "mine"
    token.rename(tmp_path / "elsewhere")
    assert found() is None
    token.symlink_to(tmp_path / "elsewhere")
    assert found() is None


def test_settings_of_a_dev_node_are_shown_without_making_anything(tmp_path: Path) -> None:
    """``--print-settings`` leaves no secret behind."""
    shown = invoke("serve", "--dev", "--print-settings", "--json", "-w", tmp_path / "w")

    assert lines(shown.stdout)[0]["server"]["host"] == "127.0.0.1"
    assert not (tmp_path / "w").exists()
