"""What is built and installed: a wheel without a compiler, the room it takes, other versions of Python."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path
from typing import Final

import pytest

REPOSITORY: Final = Path(__file__).parents[2]
PROJECT: Final = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))["project"]
PIP: Final = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]
BASE_BYTES_MAX: Final = 60_000_000
CLASSIFIED: Final = [
    each.rpartition(" ")[2]
    for each in PROJECT["classifiers"]
    if each.startswith("Programming Language :: Python :: 3.")
]


def test_every_extra_is_there_for_something() -> None:
    """Each extra is one that the page about installing names, or one for developers."""
    page = (REPOSITORY / "docs/howto/install.md").read_text(encoding="utf-8")
    extras = PROJECT["optional-dependencies"].keys() - {"bench", "dev"}

    assert sorted(extra for extra in extras if f"| `{extra}` |" not in page) == []
    assert "urls" not in PROJECT


def source_in(folder: Path) -> Path:
    """A copy of what a wheel is built from, with nothing compiled."""
    source = folder / "source"
    source.mkdir()
    for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE"):
        shutil.copy(REPOSITORY / name, source)
    shutil.copytree(REPOSITORY / "src", source / "src", ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    return source


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The base with its dependencies, in a folder; the wheel was built where every compiler fails."""
    folder = tmp_path_factory.mktemp("packaging")
    environment = {**os.environ, "CC": "/bin/false", "CXX": "/bin/false"}
    subprocess.run(
        [*PIP, "wheel", "--no-deps", "-w", folder, source_in(folder)],
        env=environment,
        check=True,
        timeout=600,
        capture_output=True,
    )
    [wheel] = folder.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    assert [name for name in zipfile.ZipFile(wheel).namelist() if name.endswith((".so", ".c"))] == []
    target = folder / "installed"
    requirements = ["-r", str(REPOSITORY / "requirements/base.txt")]
    subprocess.run(
        [*PIP, "install", "--no-deps", "--target", target, *requirements, wheel],
        check=True,
        timeout=600,
        capture_output=True,
    )
    return target


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_a_wheel_that_was_built_without_a_compiler_works(installed: Path, tmp_path: Path) -> None:
    """It imports with nothing but the base's pins, runs the quickstart twice, and its tool reads what that wrote."""
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(installed)}

    def run(*words: str) -> str:
        command = [sys._base_executable, *words]  # type: ignore[attr-defined]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=120)
        assert done.returncode == 0, done.stderr
        return done.stdout

    assert [run(str(REPOSITORY / "examples/quickstart.py")) for _ in range(2)] == ["billed order 1: 12.50\n"] * 2
    assert run("-m", "tidings.cli", "--version") == f"tidings {PROJECT['version']} (Python alone)\n"
    assert run("-m", "tidings.cli", "log", "read", "orders", "--json").count("ORDER_PLACED") == 2


@pytest.mark.heavy
@pytest.mark.timeout(1500)
def test_the_base_takes_less_than_60_megabytes(installed: Path) -> None:
    """All files of the base and its dependencies, bytecode included."""
    assert sum(path.stat().st_size for path in installed.rglob("*") if path.is_file()) < BASE_BYTES_MAX


@pytest.mark.heavy
@pytest.mark.timeout(2700)
@pytest.mark.parametrize("version", [each for each in CLASSIFIED if each != "{}.{}".format(*sys.version_info)])
def test_it_works_with_each_python_that_is_named(version: str, tmp_path: Path) -> None:
    """Where there is such an interpreter: an environment of all pins, the package compiled for it, and the unit tests but for those with Spark."""
    python = interpreter(version)
    if python is None:
        pytest.skip(f"there is no Python {version} on this machine")
    subprocess.run([python, "-m", "venv", tmp_path / "venv"], check=True, timeout=300)
    own = str(tmp_path / "venv/bin/python")
    for command in (
        ["tools/install.py", "everything", "requirements/dev.txt"],
        ["-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps", source_in(tmp_path)],
    ):
        subprocess.run([own, *command], cwd=REPOSITORY, check=True, timeout=1200, capture_output=True)
    tests = [own, "-m", "pytest", "-q", "-m", "not heavy and not spark", "-p", "no:cacheprovider", "-n", "2"]
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(tmp_path / "bytecode")}
    done = subprocess.run(
        [*tests, "tests/unit"], cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=1200
    )

    assert done.returncode == 0, done.stdout[-4000:]


def interpreter(version: str) -> str | None:
    """An interpreter of this version: on the path, or of pyenv."""
    for found in (
        shutil.which(f"python{version}"),
        *map(str, Path.home().glob(f".pyenv/versions/{version}.*/bin/python")),
    ):
        if found is not None:
            said = subprocess.run([found, "--version"], capture_output=True, text=True, check=False).stdout
            if said.startswith(f"Python {version}."):
                return found
    return None
