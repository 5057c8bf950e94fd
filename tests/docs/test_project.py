"""The project's own files agree with each other."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import tidings

REPOSITORY = Path(__file__).parents[2]
PROJECT = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIN_FILES = sorted((REPOSITORY / "requirements").glob("*.txt"))


def pins(path: Path) -> dict[str, str]:
    return dict(line.split(" ;")[0].split("==") for line in path.read_text(encoding="utf-8").splitlines())


def name_of(requirement: str) -> str:
    found = re.match(r"[A-Za-z0-9.\-]+", requirement)
    assert found is not None
    return found[0].lower()


def test_the_version_is_said_once() -> None:
    """The package and its metadata name the same version."""
    assert tidings.__version__ == PROJECT["version"]


def test_importing_the_package_loads_nothing_heavy() -> None:
    """``import tidings`` brings in neither the event loop nor any dependency."""
    script = "import sys, tidings; print(*sorted({'asyncio', 'msgspec', 'orjson', 'lmdb', 'typer'} & set(sys.modules)))"

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == ""


def test_the_face_has_every_name_it_promises() -> None:
    """Each name of ``tidings.__all__`` is there, is loaded when it is first used, and is the class of its own module."""
    script = (
        "import sys, tidings\n"
        "assert not [name for name in sys.modules if name.startswith('tidings.')]\n"
        "from tidings import Ack, Event, EventMeta\n"
        "assert 'tidings.server' not in sys.modules and 'tidings.client' not in sys.modules\n"
        "missing = [name for name in tidings.__all__ if getattr(tidings, name, None) is None or name not in dir(tidings)]\n"
        "from tidings import Bus, Client, EventBus\n"
        "from tidings.client import RemoteBus\n"
        "print(missing, Bus is EventBus, Client is RemoteBus, hasattr(tidings, 'Buss'))"
    )

    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)

    assert done.stdout.strip() == "[] True True False"


@pytest.mark.parametrize("path", PIN_FILES, ids=lambda path: path.name)
def test_every_pin_is_exact(path: Path) -> None:
    """A line of the pins is a name, ``==``, a version and at most a marker: no address, hash, path or comment."""
    shape = re.compile(r"[a-z0-9\-]+(\[[a-z,\-]+\])?==[0-9][A-Za-z0-9.+!]*( ; [a-z_]+ [^@/#]+)?")

    assert [line for line in path.read_text(encoding="utf-8").splitlines() if not shape.fullmatch(line)] == []


def test_the_pins_cover_what_is_declared() -> None:
    """Each declared dependency is pinned, and what developers run is what users run."""
    base, dev = (pins(REPOSITORY / "requirements" / f"{name}.txt") for name in ("base", "dev"))

    assert {name_of(each) for each in PROJECT["dependencies"]} <= base.keys()
    assert {name_of(each) for each in PROJECT["optional-dependencies"]["dev"]} <= dev.keys()
    assert base.items() <= dev.items()
