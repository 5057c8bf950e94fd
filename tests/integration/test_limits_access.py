"""Limits of tokens, key sets, apps and settings at a node: beyond them the caller is refused, and what is in force stays."""

from __future__ import annotations

import base64
import json
import time
from pathlib import Path
from typing import Any

import jwt
import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from tests.beyond import Beyond, crossed
from tests.integration.test_limits_api import node_with
from tidings.access import apps, tokens
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.access.tokens import KeyRing
from tidings.core.errors import SettingsError
from tidings.server import configuration
from tidings.testing.node import TEST_SECRET, node_settings

HOUR_S = 3_600


async def status_of(client: Any, **claims: Any) -> int:
    """The status with which the node answers a token of these claims."""
    now_s = int(time.time())
    payload = {"sub": "ana", "iat": now_s, "exp": now_s + HOUR_S, "roles": ["admin"], **claims}
    token = jwt.encode(payload, TEST_SECRET, algorithm="HS256")
    answer = await client.get("/v1/topics", headers={"Authorization": f"Bearer {token}"})
    return int(answer.status_code)


@pytest.mark.bound(
    "access.settings.TokenSettings.leeway_s",
    "access.settings.TokenSettings.lifetime_s_max",
    "access.tokens._SECONDS_MAX",
)
@crossed
async def test_a_token_outside_its_time_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """A token is good within the leeway and up to the longest lifetime; one that ended earlier, or lives longer, is a 401."""
    async with node_with(tmp_path) as (_, client):
        now_s, lifetime_s = int(time.time()), 30 * 86_400
        assert await status_of(client, iat=now_s - HOUR_S, exp=now_s - 20) == 200
        assert await status_of(client, iat=now_s - HOUR_S, exp=now_s - beyond(30)) == 401
        assert await status_of(client, iat=now_s, exp=now_s + lifetime_s) == 200
        assert await status_of(client, iat=now_s, exp=now_s + beyond(lifetime_s) + 30) == 401
        assert await status_of(client, iat=now_s, exp=beyond(tokens._SECONDS_MAX)) == 401


@pytest.mark.bound("access.tokens._NAMES_MAX")
@crossed
async def test_a_token_with_more_names_is_rejected(tmp_path: Path, beyond: Beyond) -> None:
    """A claim may list as many names as allowed, where the token may be long enough for them; a longer list is a 401."""
    given = node_settings(head_bytes_max=1 << 20)
    access = AccessSettings(tokens=TokenSettings(secret=TEST_SECRET, token_bytes_max=1 << 20))
    async with node_with(tmp_path, msgspec.structs.replace(given, access=access)) as (_, client):
        assert await status_of(client, topics=["t"] * tokens._NAMES_MAX) == 200
        assert await status_of(client, topics=["t"] * beyond(tokens._NAMES_MAX)) == 401


def jwks(count: int, *, key_id: str = "k") -> str:
    """A key set of Ed25519 keys."""
    keys = []
    for number in range(count):
        raw = Ed25519PrivateKey.generate().public_key().public_bytes_raw()
        x = base64.urlsafe_b64encode(raw).rstrip(b"=").decode()
        keys.append({"kty": "OKP", "crv": "Ed25519", "kid": f"{key_id}{number}" if count > 1 else key_id, "x": x})
    return json.dumps({"keys": keys})


@pytest.mark.bound("access.tokens._KEYS_MAX", "access.tokens._KEY_ID_CHARS_MAX")
@crossed
def test_a_larger_key_set_is_rejected(beyond: Beyond) -> None:
    """A set of more keys, and one with a longer key id, raise; at the limits they are read."""
    assert len(KeyRing(TokenSettings(key_set=jwks(tokens._KEYS_MAX)))) == tokens._KEYS_MAX
    with pytest.raises(SettingsError):
        KeyRing(TokenSettings(key_set=jwks(beyond(tokens._KEYS_MAX))))
    KeyRing(TokenSettings(key_set=jwks(1, key_id="k" * tokens._KEY_ID_CHARS_MAX)))
    with pytest.raises(SettingsError):
        KeyRing(TokenSettings(key_set=jwks(1, key_id="k" * beyond(tokens._KEY_ID_CHARS_MAX))))


@pytest.mark.bound("access.apps._APPS_MAX", "access.apps._EVENT_TYPES_MAX", "access.apps._CHANNELS_MAX")
@crossed
@pytest.mark.parametrize("kind", ["apps", "event_types", "channels"])
async def test_one_more_app_event_type_or_channel_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, beyond: Beyond
) -> None:
    """As many as allowed are registered; each further one is refused, and those that are registered stay."""
    async with node_with(tmp_path) as (_, client):

        async def register(number: int) -> int:
            if kind == "apps":
                return int(
                    (await client.post("/v1/apps", json={"type": "app.registered", "slug": f"app{number}"})).status_code
                )
            if kind == "event_types":
                body: dict[str, Any] = {
                    "type": "app.event_type_declared",
                    "slug": "shop",
                    "event_type": f"app.shop.e{number}",
                    "topic": "orders",
                }
            else:
                body = {
                    "type": "app.channel_registered",
                    "channel": f"c{number}",
                    "owner_app_id": "shop",
                    "reader_app_ids": ["other"],
                    "domain_ids": ["orders"],
                }
            return int((await client.post("/v1/apps", json=body)).status_code)

        registered = len((await client.get("/v1/apps")).json()["apps"])
        monkeypatch.setattr(apps, f"_{kind.upper()}_MAX", 3 + (registered if kind == "apps" else 0))
        if kind != "apps":
            for slug in ("shop", "other"):
                assert (await client.post("/v1/apps", json={"type": "app.registered", "slug": slug})).status_code == 201
        assert {await register(number) for number in range(3)} <= {200, 201}
        assert {await register(number) // 100 for number in range(3, beyond(3))} == {4}


@pytest.mark.bound("server.configuration._OVERRIDES_MAX")
@crossed
async def test_more_overrides_are_refused_together(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beyond: Beyond
) -> None:
    """A change beyond the number of overrides is refused, and nothing of it is in force."""
    monkeypatch.setattr(configuration, "_OVERRIDES_MAX", 2)
    async with node_with(tmp_path) as (_, client):
        good = {"event.delivery.max_msgs_per_sec": 10, "event.delivery.resume_window": 20}
        assert (await client.patch("/v1/config", json={"values": good})).status_code == 200
        more = {**good, **{f"event.unknown{number}": 1 for number in range(beyond(2) - 2)}}
        assert (await client.patch("/v1/config", json={"values": more})).status_code // 100 == 4
        assert (await client.get("/v1/config")).json()["overrides"] == good
