"""What a reload takes over, and what it says needs a restart."""

from __future__ import annotations

import msgspec

from tidings.access.settings import AccessSettings, TokenSettings
from tidings.server.settings import NodeSettings, ServerSettings, plan_reload


def test_limits_and_keys_are_taken_over_and_addresses_are_not() -> None:
    """The plan's settings have the new limits and keys, and keep the old address; both are named."""
    old = NodeSettings()
    new = NodeSettings(
        server=ServerSettings(port=1, host="::1", connections_max=7, log_level="debug"),
        access=AccessSettings(is_open=True, tokens=TokenSettings(leeway_s=5)),
    )

    plan = plan_reload(old, new)

    assert plan.applied == ("server.connections_max", "server.log_level", "access.tokens.leeway_s")
    assert plan.kept == ("server.host", "server.port", "access.is_open")
    assert plan.settings.server.connections_max == 7
    assert plan.settings.server.port == old.server.port
    assert plan.settings.access.is_open is False


def test_nothing_changed() -> None:
    """The same settings again are nothing to take over."""
    plan = plan_reload(NodeSettings(), NodeSettings())

    assert (plan.applied, plan.kept) == ((), ())


def test_tls_cannot_be_switched_on_or_off() -> None:
    """New certificate files are taken over; TLS where there was none needs a restart, and the other way round."""
    plain = NodeSettings()
    secured = NodeSettings(server=ServerSettings(tls_cert_file="a", tls_key_file="b"))
    renewed = NodeSettings(server=ServerSettings(tls_cert_file="c", tls_key_file="d"))

    assert plan_reload(plain, secured).applied == ()
    assert plan_reload(secured, plain).kept == ("server.tls_cert_file", "server.tls_key_file")
    assert plan_reload(secured, renewed).applied == ("server.tls_cert_file", "server.tls_key_file")


def test_a_reloadable_list_names_real_settings() -> None:
    """Every name that is reloadable is a field of the settings."""
    from tidings.server.settings import RELOADABLE

    assert set(RELOADABLE) <= set(ServerSettings.__struct_fields__)
    assert msgspec.structs.replace(ServerSettings()) == ServerSettings()
