"""
What a crash leaves of a simulated disk: decided on plain values, by the crash mode and a seeded random source.

A disk is a tree of folders and files. Each holds what is seen now and what is durable; between the two lie
the pending changes, of a file's data and of names. ``survivors`` chooses among those and gives the tree that is
found after the crash. Data survives by sectors, in any selection; names in any selection too, but for changes
that share a name, which survive in their order. What was durable and is not changed stays.

Nothing here counts calls, fails or locks; ``disk`` does.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, get_args

CrashMode = Literal["lose_all", "keep_all", "random", "zero", "reorder"]
CRASH_MODES: Final[tuple[CrashMode, ...]] = get_args(CrashMode)

_SECTOR_BYTES: Final = 512


@dataclass(slots=True, eq=False, frozen=True)
class Write:
    """Bytes written; ``number`` is that of the call, which orders the changes of all files."""

    number: int
    byte_offset: int
    data: bytes

    @property
    def sectors(self) -> int:
        """How many sectors of the file it touches."""
        end = self.byte_offset + len(self.data)
        return (end - 1) // _SECTOR_BYTES - self.byte_offset // _SECTOR_BYTES + 1

    def part(self, first: int, until: int) -> tuple[int, bytes]:
        """The bytes of the write's own sectors from ``first`` to before ``until``, and where they go."""
        origin = self.byte_offset // _SECTOR_BYTES * _SECTOR_BYTES
        start = max(self.byte_offset, origin + first * _SECTOR_BYTES)
        return start, self.data[start - self.byte_offset : origin + until * _SECTOR_BYTES - self.byte_offset]


@dataclass(slots=True, eq=False, frozen=True)
class Truncate:
    """A size given to a file."""

    number: int
    size: int

    sectors = 1


Change = Write | Truncate


@dataclass(slots=True, eq=False)
class Inode:
    """
    A file: what reads see, what the disk has, and the changes that lie between.

    Crash tests copy disks by the thousand and write to few of their files. So copies share their buffers
    (one may then also be content and durable at once) until ``own`` is called, before any change.
    """

    content: bytearray = field(default_factory=bytearray)
    durable: bytearray = field(default_factory=bytearray)
    pending: list[Change] = field(default_factory=list)
    is_shared: bool = False

    def own(self) -> Inode:
        """Have buffers that no copy shares; before any change of them."""
        if self.is_shared:
            self.content, self.durable, self.is_shared = bytearray(self.content), bytearray(self.durable), False
        return self

    def __deepcopy__(self, memo: object) -> Inode:
        self.is_shared = True
        return Inode(self.content, self.durable, list(self.pending), is_shared=True)


@dataclass(slots=True, eq=False)
class Folder:
    """A folder: the names that are seen in it, and those that the disk has."""

    entries: dict[str, Node] = field(default_factory=dict)
    durable: dict[str, Node] = field(default_factory=dict)


Node = Inode | Folder


@dataclass(slots=True, eq=False)
class Renaming:
    """A pending change of names: one is cleared, one is given to a node, or both at once."""

    cleared: tuple[Folder, str] | None
    given: tuple[Folder, str, Node] | None

    def places(self) -> list[tuple[Folder, str]]:
        """The names it changes, each with its folder."""
        places = [] if self.cleared is None else [self.cleared]
        return places if self.given is None else [*places, self.given[:2]]

    def apply(self, entries_of: Callable[[Folder], dict[str, Node]]) -> None:
        """Carry it out in what ``entries_of`` gives for each folder."""
        if self.cleared is not None:
            entries_of(self.cleared[0]).pop(self.cleared[1], None)
        if self.given is not None:
            folder, name, node = self.given
            entries_of(folder)[name] = node


def entries_now(folder: Folder) -> dict[str, Node]:
    """The names that are seen in a folder."""
    return folder.entries


def walk(
    folder: Folder, entries_of: Callable[[Folder], dict[str, Node]], path: Path = Path()
) -> Iterator[tuple[Path, Inode]]:
    """Every file below a folder, with its path from there."""
    for name, node in entries_of(folder).items():
        if isinstance(node, Folder):
            yield from walk(node, entries_of, path / name)
        else:
            yield path / name, node


def put(image: bytearray, byte_offset: int, data: bytes) -> None:
    """Write into an image; a gap before the data is filled with zeros."""
    if byte_offset > len(image):
        image.extend(bytes(byte_offset - len(image)))
    image[byte_offset : byte_offset + len(data)] = data


def resize(image: bytearray, size: int) -> None:
    """Cut an image, or fill it up with zeros."""
    if size < len(image):
        del image[size:]
    else:
        image.extend(bytes(size - len(image)))


def apply(image: bytearray, change: Change) -> None:
    """Carry a change out whole."""
    if isinstance(change, Write):
        put(image, change.byte_offset, change.data)
    else:
        resize(image, change.size)


def with_earlier(changes: Sequence[Renaming], chosen: list[bool]) -> list[bool]:
    """
    ``chosen``, and every earlier change that shares a name with a chosen one.

    Without those, what a rename moved out of the way could be lost under both its names.
    """
    places: set[tuple[int, str]] = set()
    closed = list(chosen)
    for at in range(len(changes) - 1, -1, -1):
        own = {(id(folder), name) for folder, name in changes[at].places()}
        closed[at] = closed[at] or not own.isdisjoint(places)
        if closed[at]:
            places |= own
    return closed


def survivors(top: Folder, renamings: Sequence[Renaming], mode: CrashMode, rng: random.Random) -> Folder:
    """
    What a crash leaves of a tree: a new one, in which everything is durable and nothing pending.

    The tree itself stays as it is, but for sharing its buffers with the new one.

    Args:
        top: The topmost folder.
        renamings: The pending changes of names, in their order.
        mode: What becomes of what was not synced.
        rng: Decides among what the mode allows.
    """
    survival = _Survival(mode, rng)
    entries: dict[int, dict[str, Node]] = {}

    def entries_of(folder: Folder) -> dict[str, Node]:
        return entries.setdefault(id(folder), dict(folder.durable))

    kept = with_earlier(renamings, survival.names(len(renamings)))
    for renaming, is_kept in zip(renamings, kept, strict=True):
        if is_kept:
            renaming.apply(entries_of)
    files = [node for _, node in walk(top, entries_of)]
    images = dict(zip(map(id, files), survival.contents(files), strict=True))

    def rebuilt(node: Node) -> Node:
        return rebuilt_folder(node) if isinstance(node, Folder) else rebuilt_file(node)

    def rebuilt_folder(folder: Folder) -> Folder:
        nodes = {name: rebuilt(below) for name, below in entries_of(folder).items()}
        return Folder(nodes, dict(nodes))

    def rebuilt_file(inode: Inode) -> Inode:
        inode.is_shared = True
        return Inode(images[id(inode)], images[id(inode)], is_shared=True)

    return rebuilt_folder(top)


class _Survival:
    """What a crash leaves of pending changes. Decides only; the disk it is asked for stays as it is."""

    def __init__(self, mode: CrashMode, rng: random.Random) -> None:
        self._mode = mode
        self._random = rng

    def names(self, count: int) -> list[bool]:
        """Which of ``count`` pending changes of names survive."""
        match self._mode:
            case "lose_all":
                return [False] * count
            case "keep_all" | "zero":
                return [True] * count
            case "reorder":
                lost = self._random.randint(0, count)
                return [at >= lost for at in range(count)]
            case "random":
                # Kept more often than not: a file whose name is lost shows nothing of what became of its data.
                chance = self._random.choice((0.5, 0.75, 1.0))
                return [self._random.random() < chance for _ in range(count)]

    def contents(self, inodes: Sequence[Inode]) -> list[bytearray]:
        """What each file holds afterwards, in a buffer of its own if it is not just what was durable."""
        if self._mode == "lose_all":
            return [inode.durable for inode in inodes]
        images = [bytearray(inode.durable) if inode.pending else inode.durable for inode in inodes]
        pending = [(change, image) for inode, image in zip(inodes, images, strict=True) for change in inode.pending]
        pending.sort(key=lambda each: each[0].number)
        match self._mode:
            case "keep_all":
                for change, image in pending:
                    apply(image, change)
            case "zero":
                for change, image in pending:
                    self._grow(image, change)
            case "reorder":
                self._keep_the_later(pending)
            case "random":
                for change, image in pending:
                    self._scatter(image, change)
        return images

    def _grow(self, image: bytearray, change: Change) -> None:
        if isinstance(change, Truncate):
            resize(image, change.size)
        else:
            self._reach(image, change.byte_offset + len(change.data))

    def _reach(self, image: bytearray, size: int) -> None:
        resize(image, max(size, len(image)))

    def _keep_the_later(self, pending: Sequence[tuple[Change, bytearray]]) -> None:
        """Lose everything up to some sector of some write, over all files, and keep what was written after it."""
        if not pending:
            return
        last = len(pending) - 1
        cut = self._random.randint(0, last if pending[last][0].sectors > 1 else max(0, last - 1))
        for at, (change, image) in enumerate(pending):
            if at > cut:
                apply(image, change)
            elif at == cut and isinstance(change, Write):
                lost = self._random.randint(1, max(1, change.sectors - (at == last)))
                start, data = change.part(lost, change.sectors)
                if data:
                    put(image, start, data)

    def _scatter(self, image: bytearray, change: Change) -> None:
        fate = self._random.choice(("kept", "lost", "zeroed", "torn", "scattered"))
        if isinstance(change, Truncate):
            if self._random.random() < 0.5:
                resize(image, change.size)
        elif fate == "scattered":
            # By runs, so that a write of megabytes costs no more than one of kilobytes.
            run_max = max(1, change.sectors // 8)
            first = 0
            while first < change.sectors:
                until = min(change.sectors, first + self._random.randint(1, run_max))
                self._leave(image, *change.part(first, until), self._random.choice(("kept", "lost", "zeroed", "torn")))
                first = until
        else:
            self._leave(image, change.byte_offset, change.data, fate)

    def _leave(self, image: bytearray, byte_offset: int, data: bytes, fate: str) -> None:
        if fate == "kept":
            put(image, byte_offset, data)
        elif fate == "zeroed":
            self._reach(image, byte_offset + len(data))
        elif fate == "torn":
            tear = self._random.randint(0, len(data))
            if self._random.random() < 0.5:
                put(image, byte_offset, data[:tear])
            elif tear < len(data):
                put(image, byte_offset + tear, data[tear:])
