"""``node.json`` says where the node is, whole or not at all."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tidings.server.address import NodeAddress, forget_address, publish_address, read_address


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
