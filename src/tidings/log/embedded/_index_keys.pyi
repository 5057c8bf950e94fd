from collections.abc import Sequence

from .index import IndexEntry

def fingerprint(scope: bytes, text: str) -> bytes: ...
def collect_keys(
    entries: Sequence[IndexEntry],
    numbers: dict[str, int],
    ids: list[list[bytes]],
    idem: list[list[bytes]],
    partitions: dict[str, list[bytes]],
) -> None: ...
