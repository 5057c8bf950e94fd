"""``tidings events tail``: what the node of the workspace delivers."""

from __future__ import annotations

from pathlib import Path

import httpx
import msgspec

from tests.integration.cli.support import invoke, started
from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK

SECRET = "a secret for the processes of these tests"


def test_the_tool_shows_events_until_it_has_enough(tmp_path: Path) -> None:
    """Those after ``--since`` first, narrowed by what is asked for; without a node it says so."""
    file = tmp_path / "node.toml"
    file.write_text(f'[server]\nport = 0\n[log]\njournal_bytes = 1048576\n[access.tokens]\nsecret = "{SECRET}"\n')
    claims = TokenClaims(roles=frozenset({"admin"}))
    token = TokenIssuer(TokenSettings(secret=SECRET), SYSTEM_CLOCK).issue("boss", claims=claims)
    at = ("events", "tail", "-w", tmp_path / "ws", "--since", 0, "--token", token)
    with started("serve", "-w", tmp_path / "ws", "--config", file, "--json") as process:
        url, headers = process.json()["url"], {"authorization": f"Bearer {token}"}
        for number in (1, 2, 3):
            meta = {"topic": "orders", "type": "PLACED", "space_id": "shop", "objects": [f"order:{number}"]}
            assert (
                httpx.post(f"{url}/v1/events", json={"meta": meta, "payload": {}}, headers=headers).status_code == 201
            )
        plain = invoke(*at, "--domain", "orders", "--count", 3)
        narrowed = invoke(*at, "--object", "order:2", "--count", 1, "--json")
        refused = invoke(*at, "--object", "nothing")
        others = [invoke(*words, "-w", tmp_path / "ws", "--token", "a.b.c") for words in (at[:2], ("subject", "list"))]
    without = invoke(*at)

    shown = [line.split()[1:4] for line in plain.stdout.splitlines()]
    assert shown == [["graph.object_mutated", "orders", f"order:{number}"] for number in (1, 2, 3)]
    assert msgspec.json.decode(narrowed.stdout)["payload_summary"]["object_ids"] == ["order:2"]
    assert (refused.exit_code != 0, "type:id" in refused.stderr) == (True, True)
    assert "events that name objects" in plain.stderr
    assert all("the token that was shown is that of --token" in each.stderr for each in others)
    assert (without.exit_code != 0, "no node holds the workspace" in without.stderr) == (True, True)
