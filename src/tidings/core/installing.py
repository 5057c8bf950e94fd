"""What to type to install an extra, as this copy of Tidings was installed: from a checkout, from a folder, or by its name."""

from __future__ import annotations

import importlib.metadata
import os
import shlex
import sys
from pathlib import Path
from urllib.parse import unquote, urlsplit

import msgspec


def install_line(extra: str) -> str:
    """The command that adds an extra to the interpreter that runs."""
    source = _source()
    wanted = f"tidings[{extra}]" if source is None else f"{_short(source)}[{extra}]"
    return f"{shlex.quote(_short(Path(sys.executable)))} -m pip install {shlex.quote(wanted)}"


def _source() -> Path | None:
    """The folder that this copy comes from, if it is still there; ``None`` for one from a registry."""
    checkout = Path(__file__).parents[3]
    if (checkout / "pyproject.toml").is_file():
        return checkout
    try:
        told = importlib.metadata.distribution("tidings").read_text("direct_url.json") or "{}"
        parts = urlsplit(str(msgspec.json.decode(told).get("url", "")))
    except (importlib.metadata.PackageNotFoundError, msgspec.DecodeError, ValueError):
        return None
    folder = Path(unquote(parts.path))
    return folder if parts.scheme == "file" and (folder / "pyproject.toml").is_file() else None


def _short(path: Path) -> str:
    """A path as it is typed in this folder: what lies below it without what is above."""
    here = Path.cwd()
    if path == here:
        return "."
    return os.path.join(".", path.relative_to(here)) if path.is_relative_to(here) else str(path)
