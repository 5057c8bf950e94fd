"""``node.json`` says where the node is, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.beyond import Beyond, crossed
from tidings.server.address import _BYTES_MAX, NodeAddress, forget_address, publish_address, read_address


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    (tmp_path / ".bus").mkdir()
    return tmp_path


def test_published_read_and_forgotten(workspace: Path) -> None:
    """What a node publishes is read back; after it is gone there is nothing."""
    address = NodeAddress("http://127.0.0.1:1", os.getpid(), "/tmp/s")
    publish_address(workspace, address)

    assert read_address(workspace) == address
    forget_address(workspace)
    assert read_address(workspace) is None
    assert list((workspace / ".bus").iterdir()) == []


def test_another_nodes_address_stays(workspace: Path) -> None:
    """A node takes away its own address only."""
    address = NodeAddress("http://127.0.0.1:1", os.getpid() + 1)
    publish_address(workspace, address)
    forget_address(workspace)

    assert read_address(workspace) == address


@pytest.mark.parametrize("content", [b"", b"{", b"[]", b'{"url": 3}'])
def test_what_is_not_legible_is_no_address(workspace: Path, content: bytes) -> None:
    """A damaged file is as good as none."""
    (workspace / ".bus" / "node.json").write_bytes(content)

    assert read_address(workspace) is None


@pytest.mark.bound("server.address._BYTES_MAX")
@crossed
def test_a_larger_file_is_no_address(workspace: Path, beyond: Beyond) -> None:
    """A file at the limit is read; of a larger one no more than that is, and it is as good as none."""
    path = workspace / ".bus" / "node.json"

    def of_bytes(size: int) -> bytes:
        head, tail = b'{"url": "http://127.0.0.1:1/', b'", "pid": 1}'
        return head + b"x" * (size - len(head) - len(tail)) + tail

    path.write_bytes(of_bytes(_BYTES_MAX))
    assert read_address(workspace) is not None
    path.write_bytes(of_bytes(beyond(_BYTES_MAX)))
    assert read_address(workspace) is None
