"""What is printed to be pasted names the tool as it can be typed there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tidings.cli import pasting


def test_the_tool_is_named_as_it_can_be_typed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By its name alone where the shell finds this very one; else by the path it was started by, or through the interpreter."""
    monkeypatch.chdir(tmp_path)
    names = []
    for folder in ("my env/bin", "other"):
        (tmp_path / folder).mkdir(parents=True)
        for name in ("tidings", "python"):
            (tmp_path / folder / name).touch(mode=0o755)
    for path, started_as in (
        ("my env/bin", "my env/bin/tidings"),
        ("other", "my env/bin/tidings"),
        ("nowhere", "my env/bin/tidings"),
        ("other", "cli/__main__.py"),
    ):
        monkeypatch.setenv("PATH", str(tmp_path / path))
        monkeypatch.setattr(sys, "argv", [started_as])
        names.append((pasting.tool(), pasting.python()))

    mine = ("'my env/bin/tidings'", "'my env/bin/python'")
    assert names == [
        ("tidings", "'my env/bin/python'"),
        mine,
        mine,
        (f"{sys.executable} -m tidings.cli", sys.executable),
    ]
    assert pasting.shown(Path("a b")) == "'a b'"
    assert pasting.shown(tmp_path / "w") == "w"
    assert pasting.shown(Path("/elsewhere/w")) == "/elsewhere/w"
