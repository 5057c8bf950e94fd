"""Limits of the steward's socket: beyond them a connection or a frame is refused, and the others are served."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from tests.beyond import Beyond, crossed
from tests.integration.node_support import until
from tests.integration.steward.support import SocketClient, stewarding
from tidings.core.errors import SettingsError
from tidings.steward import capabilities
from tidings.steward.capabilities import load_policy
from tidings.wire.steward import frames


@pytest.mark.bound("steward.settings.StewardSettings.connections_max")
@crossed
async def test_one_more_connection_is_closed(tmp_path: Path, beyond: Beyond) -> None:
    """As many connections as allowed are answered; each further one is closed at once; when one leaves there is a place."""
    async with stewarding(tmp_path, steward={"connections_max": 3}) as node:
        clients = [await SocketClient.connect(tmp_path) for _ in range(3)]
        for client in clients:
            assert await client.ask("list_plugins")
        for _ in range(3, beyond(3)):
            refused = await SocketClient.connect(tmp_path)
            assert await refused.receive() is None
            await refused.close()
        await clients[0].close()
        socket = node._parts.steward_socket  # type: ignore[union-attr]
        assert socket is not None
        await until(lambda: len(socket.endpoint.connections) == 2)
        again = await SocketClient.connect(tmp_path)
        assert await again.ask("list_plugins")
        for client in (*clients[1:], again):
            await client.close()


@pytest.mark.bound("wire.steward.frames.FRAME_BYTES_MAX")
@crossed
async def test_a_longer_frame_closes_the_connection(tmp_path: Path, beyond: Beyond) -> None:
    """A frame that announces more is refused before its content comes; another connection is answered."""
    async with stewarding(tmp_path):
        client, other = await SocketClient.connect(tmp_path), await SocketClient.connect(tmp_path)
        client.writer.write(struct.pack(">I", beyond(frames.FRAME_BYTES_MAX)))
        while await client.receive() is not None:
            pass
        assert await other.ask("list_plugins")
        await client.close()
        await other.close()


@pytest.mark.bound("steward.settings.StewardSettings.partial_bytes_max")
@crossed
async def test_halves_of_frames_are_limited_over_all_connections(tmp_path: Path, beyond: Beyond) -> None:
    """The connection whose unfinished frame goes beyond the limit is closed; its memory is free again, and others are answered."""
    limit = 65 << 20
    size = 60 << 20
    async with stewarding(tmp_path, steward={"partial_bytes_max": limit}) as node:
        socket = node._parts.steward_socket  # type: ignore[union-attr]
        assert socket is not None
        first, other = await SocketClient.connect(tmp_path), await SocketClient.connect(tmp_path)
        half = struct.pack(">I", 64 << 20) + bytes(size)
        first.writer.write(half)
        await until(lambda: socket.partial_bytes == len(half))
        for _ in range(-(-(beyond(limit) - size) // size)):
            more = await SocketClient.connect(tmp_path)
            more.writer.write(half)
            assert await more.receive() is None
            await more.close()
        await until(lambda: socket.partial_bytes == len(half))
        assert await other.ask("list_plugins")
        await first.close()
        await until(lambda: socket.partial_bytes == 0)
        await other.close()


@pytest.mark.bound("steward.capabilities._POLICY_BYTES_MAX")
@crossed
def test_a_larger_policy_file_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """A file at the limit is read; a larger one raises with its name."""
    path = tmp_path / "capabilities.toml"
    path.write_text("#" * capabilities._POLICY_BYTES_MAX)
    load_policy(path, 0)
    path.write_text("#" * beyond(capabilities._POLICY_BYTES_MAX))
    with pytest.raises(SettingsError, match="longer"):
        load_policy(path, 0)
