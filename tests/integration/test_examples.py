"""Every example runs as it stands, in an empty folder, and says what it promises."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

EXAMPLES: Final = Path(__file__).parents[2] / "examples"
SAID: Final = {
    "quickstart.py": ["stored at seq 1", "0 hello"],
    "safe_retry.py": ["the second is a duplicate: True", "both answers name seq 1: True"],
    "follow.py": ["seen 1", "seen 2", "seen 3"],
    "shared_list.py": [
        "offline, ana sees ['bread', 'milk'] and ben sees ['eggs', 'salt']",
        "bread is committed: True",
        "no salt is rejected: True and kept: 1",
        "together, both see ['bread', 'eggs', 'milk'] alike: True",
    ],
    "sealed_space.py": ["with the key: nobody else reads this", "without it: log.sealed_payload"],
}


def test_every_example_is_listed() -> None:
    """No example is left out of this test."""
    assert {path.name for path in EXAMPLES.glob("*.py")} == SAID.keys()


@pytest.mark.parametrize("name", SAID)
def test_an_example_does_what_it_says(name: str, tmp_path: Path) -> None:
    """The example ends well, with exactly the expected lines and no warning."""
    command = [sys.executable, "-W", "error", str(EXAMPLES / name)]

    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)

    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines() == SAID[name]


def test_the_quickstart_is_short() -> None:
    """The program on the first page has at most fifteen lines of code."""
    text = (EXAMPLES / "quickstart.py").read_text(encoding="utf-8")
    code = [line for line in text.splitlines() if line.strip() and not line.startswith(('"""', "#"))]

    assert len(code) <= 15
