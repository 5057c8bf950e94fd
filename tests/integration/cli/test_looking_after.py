"""``tidings doctor``, ``bench`` and ``errors``: what is wrong here, what this machine gives, what a code means."""

from __future__ import annotations

import json
import re
import socket
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import fill, invoke, lines
from tidings.core import installing
from tidings.core.installing import install_line
from tidings.log.embedded.layout import Layout

ERRORS_PAGE = (Path(__file__).parents[3] / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")


def findings(workspace: Path, *words: object, code: int = 0) -> dict[str, Any]:
    done = invoke("doctor", "-w", workspace, "--json", *words)
    assert done.exit_code == code, done.stdout
    return {each["check"]: each for each in lines(done.stdout)}


@pytest.fixture(autouse=True)
def no_java(monkeypatch: pytest.MonkeyPatch) -> None:
    """Starting one takes longer than all else here."""
    monkeypatch.setattr("tidings.cli.doctor._java", lambda: ())


def test_the_doctor_finds_a_sound_machine_sound(tmp_path: Path) -> None:
    """Each thing is named with what was found; a workspace that is not there yet is no problem; nothing is left behind."""
    before = findings(tmp_path / "w")
    fill(tmp_path / "w", ("demo", 3))
    after = findings(tmp_path / "w")

    assert "is not there yet" in before["workspace"]["found"]
    assert "through seq 3, nobody writes it now" in after["workspace"]["found"]
    assert {
        "version",
        "compiled part",
        "extra pipeline",
        "free space",
        "sync",
        "clock",
        "port",
        "open files",
    } <= after.keys()
    assert {each["state"] for each in after.values()} <= {"ok", "warning"}
    assert [path.name for path in tmp_path.iterdir()] == ["w"]
    assert "sync" in invoke("doctor", "-w", tmp_path / "w").stdout


def test_the_doctor_says_what_is_wrong_and_what_to_do(tmp_path: Path) -> None:
    """A workspace that cannot be opened ends it with 1; a taken port, an open folder and memory for a disk are warnings with a hint."""
    fill(tmp_path / "w", ("demo", 3))
    (tmp_path / "w").chmod(0o777)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        found = findings(tmp_path / "w", "--port", taken.getsockname()[1])
    assert (found["port"]["state"], "tidings serve --port 0" in found["port"]["hint"]) == ("warning", True)
    assert (found["permissions"]["state"], "chmod o-w" in found["permissions"]["hint"]) == ("warning", True)
    if Path("/dev/shm").is_dir():
        assert findings(Path("/dev/shm/tidings-none"))["sync"]["state"] == "warning"

    Layout(tmp_path / "w").meta.write_text("damaged")
    assert findings(tmp_path / "w", code=1)["workspace"]["state"] == "problem"


def test_a_short_measurement_leaves_nothing_behind(tmp_path: Path) -> None:
    """The raw sync stands beside what publishing and handling take; the scratch log is gone afterwards."""
    done = invoke("bench", "--seconds", "0.1", "-w", tmp_path / "w", "--json")
    found = json.loads(done.stdout)

    assert found["sync"]["p50_ms"] > 0
    assert all(found[name]["per_s"] > 0 for name in ("publish_one", "publish_256_at_once", "handle"))
    assert list(tmp_path.iterdir()) == []


def test_every_code_of_the_page_can_be_asked_for() -> None:
    """The list has each code of the reference, with whether trying again helps; one is shown whole, also by its class; a misspelt one gets its likes."""
    known = {each["code"]: each for each in lines(invoke("errors", "--json").stdout)}
    written = re.findall(r"^\| `\w+` \| `([^`]+)` \| (yes|no) \|", ERRORS_PAGE, re.MULTILINE)
    assert {code: known[code]["retryable"] for code, _ in written} == {code: again == "yes" for code, again in written}

    shown = invoke("errors", "log.storage_full").stdout
    assert invoke("errors", "tidings.log.errors.StorageFull").stdout == shown
    wrong = invoke("errors", "log.storage_ful")
    assert ("no room" in shown, "6" in shown) == (True, True)
    assert (wrong.exit_code, "log.storage_full" in wrong.stderr) == (2, True)


def test_an_extra_is_installed_from_where_this_copy_came(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """From a checkout the checkout is named, below this folder by a short path; a copy of a registry has its name."""
    checkout = Path(installing.__file__).parents[3]
    monkeypatch.chdir(checkout)
    assert install_line("pipeline").endswith(" -m pip install '.[pipeline]'")
    monkeypatch.chdir(tmp_path)
    assert f"{checkout}[pipeline]" in install_line("pipeline")

    monkeypatch.setattr(installing, "__file__", str(tmp_path / "a" / "b" / "c" / "d.py"))
    monkeypatch.setattr("importlib.metadata.distribution", lambda name: Registry())
    assert install_line("server").endswith(" -m pip install 'tidings[server]'")


class Registry:
    """What is known of a package from a registry."""

    def read_text(self, name: str) -> None:
        """Nothing says where it came from."""
