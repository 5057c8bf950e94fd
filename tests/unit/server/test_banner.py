"""The start-up lines say what is exposed and how durable it is; what is dangerous is said loudly."""

from __future__ import annotations

import pytest

from tidings.access.settings import AccessSettings, TokenSettings
from tidings.log.settings import LogSettings
from tidings.server.monitoring import banner, is_loopback, warnings
from tidings.server.settings import NodeSettings, ServerSettings

SECRET = "x" * 40
SAFE = NodeSettings(access=AccessSettings(tokens=TokenSettings(secret=SECRET)))


def lines(settings: NodeSettings) -> str:
    return "\n".join(banner(settings, url="http://h:1", endpoints=["/sync"], workspace="w", seq=3, epoch="e"))


def test_a_safe_node_says_so() -> None:
    """Address, reach, TLS, tokens, durability, endpoints, workspace: all there; nothing to warn of; no secret."""
    text = lines(SAFE)

    for part in (
        "http://h:1",
        "no TLS",
        "this machine only",
        "shared secret",
        "on disk before",
        "/sync",
        "/v1",
        "seq 3",
    ):
        assert part in text
    assert warnings(SAFE) == []
    assert SECRET not in text


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (NodeSettings(), "every token is refused"),
        (NodeSettings(access=AccessSettings(is_open=True)), "EVERYBODY"),
        (NodeSettings(access=SAFE.access, server=ServerSettings(host="0.0.0.0")), "without TLS"),
        (NodeSettings(access=SAFE.access, log=LogSettings(durability="none")), "can be lost"),
        (NodeSettings(access=SAFE.access, server=ServerSettings(origins=("*",))), "every web page"),
    ],
)
def test_what_is_dangerous_is_warned_of(settings: NodeSettings, words: str) -> None:
    """Each of the ways to expose too much has its own warning."""
    assert words in " ".join(warnings(settings))


@pytest.mark.parametrize(
    ("host", "is_near"),
    [
        *((host, True) for host in ("127.0.0.1", "127.9.9.9", "::1", "[::1]", "localhost")),
        *((host, False) for host in ("0.0.0.0", "::", "10.0.0.1", "example.org", "")),
    ],
)
def test_loopback(host: str, is_near: bool) -> None:
    """Only what surely stays on this machine counts as loopback."""
    assert is_loopback(host) is is_near
