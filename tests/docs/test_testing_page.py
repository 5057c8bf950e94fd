"""The page about tests is true: its program and its tests, as printed, and the example, in an empty folder; and what the plugin costs others."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Final

import pytest

REPOSITORY: Final = Path(__file__).parents[2]
PAGE: Final = REPOSITORY / "docs/howto/testing.md"
FILE: Final = re.compile(r"^`(\w+\.py)`:\n\n```python\n(.*?)^```$", re.DOTALL | re.MULTILINE)
INI: Final = re.compile(r"^```ini\n(.*?)^```$", re.DOTALL | re.MULTILINE)


@pytest.mark.slow
def test_the_tests_of_the_page_and_of_the_example_pass_twice_in_one_folder(tmp_path: Path) -> None:
    """With the fixtures that pytest finds by itself, and with warnings as errors."""
    text = PAGE.read_text(encoding="utf-8")
    shutil.copy(REPOSITORY / "examples/test_with_virtual_time.py", tmp_path)
    for name, program in FILE.findall(text):
        (tmp_path / name).write_text(program, encoding="utf-8")
    (tmp_path / "pytest.ini").write_text(INI.findall(text)[0] + "filterwarnings = error\n", encoding="utf-8")
    twice = "import pytest; assert [pytest.main(['-q', '-p', 'no:xdist']) for _ in range(2)] == [0, 0]"

    done = subprocess.run([sys.executable, "-c", twice], cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stdout
    assert re.findall(r"^(\d+) passed", done.stdout, re.MULTILINE) == ["10", "10"]
    assert not (tmp_path / "workspace").exists()


def test_who_does_not_use_the_plugin_pays_for_one_module(tmp_path: Path) -> None:
    """A run of pytest without these fixtures loads the plugin and the empty package, and nothing else of Tidings."""
    (tmp_path / "test_other.py").write_text(
        "import sys\n\ndef test():\n    assert sorted(n for n in sys.modules if n.startswith('tidings')) == "
        "['tidings', 'tidings.pytest_plugin']\n",
        encoding="utf-8",
    )

    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:hypothesispytest", "test_other.py"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)

    assert done.returncode == 0, done.stdout
