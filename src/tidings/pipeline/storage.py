"""
Where a lake is: a folder of this machine, or a place in an object store, by one interface.

Object stores are reached through delta-rs, which also commits to the tables, so both take the same options (keys, region,
endpoint) and understand the same addresses. A ``Storage`` can be sent to Spark's executors, where tasks write files
themselves. It holds keys: it never shows its options, and no error names them.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
import re
import shutil
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Final
from urllib.parse import unquote, urlsplit

from tidings.core.errors import SettingsError
from tidings.log.embedded.disk import OsDisk

from .errors import LakePathRefused

if TYPE_CHECKING:
    import pyarrow.fs as pafs  # type: ignore[import-untyped]

# No library of the lake is imported above: the tools ask what is archived on machines that have none.

_DISK: Final = OsDisk()
LAKE_FOLDER: Final = "lake"
"""Where in a workspace its lake is, unless somebody says otherwise."""
SCHEMES: Final = ("file", "s3", "s3a", "abfs", "abfss", "az", "adl", "gs")


@dataclass(frozen=True, slots=True)
class Storage:
    """
    A folder, by whatever it is reached; names within it are relative and have slashes.

    Make one with ``Storage.of``.
    """

    url: str
    """An absolute path of this machine, or an address such as ``s3://bucket/lake``."""
    options: tuple[tuple[str, str], ...] = field(default=(), repr=False)
    """What delta-rs calls storage options."""

    @classmethod
    def of(cls, place: str | Path | Storage, options: Mapping[str, str] | None = None) -> Storage:
        """
        The storage at a path or an address.

        Raises:
            SettingsError: Nobody knows such an address, or it has a password in it.
        """
        if isinstance(place, Storage):
            return place
        text = str(place)
        if "://" not in text:
            return cls(str(Path(text).absolute()))
        parts = urlsplit(text)
        if parts.scheme not in SCHEMES:
            raise SettingsError("lake", f"an address begins with one of {', '.join(SCHEMES)}, not {parts.scheme!r}")
        if parts.password:
            raise SettingsError("lake", "an address must not have a password in it; give it as a storage option")
        if parts.scheme == "file":
            return cls(str(Path(unquote(parts.path)).absolute()))
        return cls(text.rstrip("/"), tuple(sorted((options or {}).items())))

    def __str__(self) -> str:
        return self.url

    @property
    def scheme(self) -> str:
        """How it is reached; ``file`` for a folder of this machine."""
        return "file" if self.is_local else self.url.partition("://")[0]

    @property
    def is_local(self) -> bool:
        """Whether it is a folder of this machine."""
        return "://" not in self.url

    @property
    def path(self) -> Path:
        """
        The folder.

        Raises:
            ValueError: It is not on this machine.
        """
        if not self.is_local:
            raise ValueError(f"{self.url} is no folder of this machine")
        return Path(self.url)

    def child(self, *names: str) -> Storage:
        """A folder within it."""
        return Storage("/".join((self.url, *names)), self.options)

    @property
    def table_url(self) -> str:
        """The folder as delta-rs wants it: an address, with what has a meaning in addresses escaped."""
        return self.path.as_uri() if self.is_local else self.url

    def check_name(self) -> None:
        r"""
        Make sure that delta-rs can reach the folder: it takes ``%20`` for a blank and ``\`` for ``/``, and looks elsewhere.

        Raises:
            LakePathRefused: It cannot.
        """
        if self.is_local and (found := _MISREAD.search(str(self.path.resolve()))) is not None:
            raise LakePathRefused(
                self.url, f"its path has {found[0]!r}, which the library of the tables reads as another path"
            )

    def uri(self, name: str) -> str:
        """Where a file is, as Spark and delta-rs want it."""
        return f"{self.url}/{name}"

    def filesystem(self) -> pafs.FileSystem:
        """The same for Arrow, with names relative to this folder."""
        return _filesystem(self.url, self.options)

    def read(self, name: str) -> bytes | None:
        """A file's content; ``None`` if there is none."""
        try:
            if self.is_local:
                return (self.path / name).read_bytes()
            with self.filesystem().open_input_file(name) as file:
                return bytes(file.read())
        except FileNotFoundError:
            return None

    def replace(self, name: str, data: bytes) -> None:
        """
        Give a file new content as a whole, which lasts when this returns; a crash leaves the old content or the new.

        Any number of processes and threads may do so at once: readers see the content that one of them gave it.
        """
        if self.is_local:
            path = self.path / name
            _make_folder(path.parent)
            with replacing(path) as file:
                file.write(data)
            return
        with self.filesystem().open_output_stream(name) as file:
            file.write(data)

    @contextlib.contextmanager
    def writing(self, name: str) -> Iterator[Any]:
        """A new file for Arrow to write to, which lasts when this ends; if it ends badly there is no such file."""
        if not self.is_local:
            stream = self.filesystem().open_output_stream(name)
            yield stream  # what is not closed is never put together, so nobody sees it
            stream.close()
            return
        import pyarrow as pa

        path = self.path / name
        _make_folder(path.parent)
        try:
            with path.open("wb") as file:
                yield pa.PythonFile(file, mode="w")
                file.flush()
                os.fsync(file.fileno())
        except BaseException:
            path.unlink(missing_ok=True)
            raise
        _DISK.sync_folder(path.parent)

    def copy(self, name: str, to: str) -> None:
        """Give a file that is never changed a second name, under which it stays when the first one goes."""
        if not self.is_local:
            self.filesystem().copy_file(name, to)
            return
        source, target = self.path / name, self.path / to
        _make_folder(target.parent)
        try:
            os.link(source, target)
        except OSError:  # a file system without links, or too many of them
            shutil.copyfile(source, target)
            self.sync(to)
        _DISK.sync_folder(target.parent)

    def delete(self, names: Iterable[str]) -> None:
        """Delete files; those that are not there are no problem."""
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                self.filesystem().delete_file(name)

    def delete_folder(self, name: str) -> int:
        """Delete a folder with all that is in it; how many files there were."""
        files = self.sizes(name)
        self.delete(files)
        if self.is_local:  # elsewhere a folder is no more than the names of its files
            shutil.rmtree(self.path / name, ignore_errors=True)
        return len(files)

    def folders(self, name: str = "") -> list[str]:
        """The names of the folders in it, or in a folder of it."""
        if self.is_local:
            try:
                return sorted(each.name for each in (self.path / name).iterdir() if each.is_dir())
            except FileNotFoundError:
                return []
        from pyarrow.fs import FileSelector, FileType

        found = self.filesystem().get_file_info(FileSelector(name, allow_not_found=True))
        return sorted(each.base_name for each in found if each.type == FileType.Directory)

    def sizes(self, name: str = "") -> dict[str, int]:
        """All files below it, or below a folder of it, with their sizes."""
        from pyarrow.fs import FileSelector

        found = self.filesystem().get_file_info(FileSelector(name, recursive=True, allow_not_found=True))
        return {each.path: int(each.size) for each in found if each.is_file}

    def sync(self, *names: str) -> None:
        """Return when these files, written by others, and the names of all folders above them are on the disk."""
        if not self.is_local:
            return  # an object store answers when it is so
        folders = {}
        for name in names:
            path = self.path / name
            fd = os.open(path, os.O_RDONLY)
            try:
                os.fsync(fd)
            finally:
                os.close(fd)
            while path != self.path:
                path = path.parent
                folders[path] = True
        for folder in folders:
            _DISK.sync_folder(folder)


@functools.lru_cache(maxsize=256)
def _filesystem(url: str, options: tuple[tuple[str, str], ...]) -> pafs.FileSystem:
    from pyarrow.fs import LocalFileSystem, PyFileSystem, SubTreeFileSystem

    if "://" not in url:
        return SubTreeFileSystem(url, LocalFileSystem(use_mmap=True))
    import pyarrow as pa
    from deltalake.fs import DeltaStorageHandler

    class Handler(DeltaStorageHandler):
        def copy_file(self, src: str, dst: str) -> None:
            self._handler.copy_file(src, dst)  # delta-rs's own gives the second by a name that is not its name

        def open_output_stream(self, path: str, metadata: dict[str, str] | None = None) -> pa.PythonFile:
            return pa.PythonFile(_BytesSink(self._handler.open_output_stream(path, metadata)), mode="w")

    return PyFileSystem(Handler(url, dict(options)))


class _BytesSink:
    """delta-rs's stream takes bytes only, and Arrow hands over buffers."""

    def __init__(self, stream: Any) -> None:
        self._stream = stream
        self._size = 0
        self.closed = False

    def write(self, data: Any) -> int:
        self._stream.write(bytes(data))
        self._size += len(data)
        return len(data)

    def tell(self) -> int:
        return self._size

    def flush(self) -> None:
        """Nothing: an object is there as a whole or not at all."""

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self._stream.close()


_MISREAD: Final = re.compile(r"\\|%[0-9a-fA-F]{2}")
_fresh_numbers: Final = itertools.count()
_FRESH: Final = re.compile(r".+\.[0-9a-f]+-[0-9a-f]+\.new")
"""The name of a file whose content is being written, of a process and a number; it takes another name when it is whole."""


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[BinaryIO]:
    """
    Write a file that takes the place of another as a whole when this ends well, and lasts then.

    It is written beside the other, under a name that no other writer has, so any number of processes may replace one file.
    """
    while True:
        fresh = path.with_name(f"{path.name}.{os.getpid():x}-{next(_fresh_numbers):x}.new")
        try:
            fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue  # left by a process of that number, perhaps of another machine
        break
    try:
        with open(fd, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
    _DISK.sync_folder(path.parent)


def delete_left_over(place: Storage, *, before_ns: int) -> int:
    """Delete what writers of small files left behind when they were killed, if it was written before a time; how many files."""
    found = []
    for path in place.path.iterdir() if place.is_local and place.path.is_dir() else ():
        with contextlib.suppress(FileNotFoundError):
            if _FRESH.fullmatch(path.name) and path.stat().st_mtime_ns < before_ns:
                found.append(path.name)
    place.delete(found)
    return len(found)


def _make_folder(folder: Path) -> None:
    """Make a folder and those above it; their names last when this returns."""
    missing = []
    while not folder.is_dir():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        each.mkdir(exist_ok=True)
        _DISK.sync_folder(each.parent)
