"""The client behind trusted proxies is the rightmost address that is not theirs."""

from __future__ import annotations

import pytest

from tidings.core.errors import SettingsError
from tidings.core.settings import checked
from tidings.server.proxies import TrustedProxies
from tidings.server.settings import ServerSettings

_PROXIES = TrustedProxies(("10.0.0.0/8", "192.0.2.1", "2001:db8:1::/48"))


@pytest.mark.parametrize(
    ("address", "is_trusted"),
    [
        ("10.1.2.3", True),
        ("::ffff:10.1.2.3", True),
        ("192.0.2.1", True),
        ("192.0.2.2", False),
        ("2001:db8:1::7", True),
        ("2001:db8:2::7", False),
        ("unix", False),
        ("", False),
    ],
)
def test_proxies_are_addresses_and_networks(address: str, is_trusted: bool) -> None:
    """An address of IPv4 is the same within IPv6; a name is none."""
    assert _PROXIES.trusts(address) is is_trusted


@pytest.mark.parametrize(
    ("headers", "client"),
    [
        ([], "10.0.0.1"),
        (["203.0.113.7"], "203.0.113.7"),
        (["203.0.113.7, 10.0.0.2"], "203.0.113.7"),
        (["1.1.1.1, 203.0.113.7, 10.0.0.2, 192.0.2.1"], "203.0.113.7"),
        (["1.1.1.1", "203.0.113.7", "10.0.0.2"], "203.0.113.7"),
        (["203.0.113.7:4711, 10.0.0.2"], "203.0.113.7"),
        (["[2001:db8:2::7]:4711"], "2001:db8:2::7"),
        (["2001:db8:2::7"], "2001:db8:2::7"),
        (["::ffff:203.0.113.7"], "203.0.113.7"),
        (["10.0.0.3, 10.0.0.2"], "10.0.0.3"),
        (["203.0.113.7, unknown"], "10.0.0.1"),
        (["203.0.113.7, , 10.0.0.2"], "10.0.0.2"),
        (["<script>, 10.0.0.2"], "10.0.0.2"),
        ([""], "10.0.0.1"),
        (["1.1.1.1," * 10_000 + "203.0.113.7"], "203.0.113.7"),
    ],
)
def test_the_client_is_the_rightmost_address_that_is_not_a_proxys(headers: list[str], client: str) -> None:
    """What stands left of it was written by the client; what is no address ends the search at the proxy that passed it on."""
    given = [(b"x-forwarded-for", value.encode()) for value in headers]
    assert _PROXIES.client("10.0.0.1", [(b"host", b"n"), *given]) == client


@pytest.mark.parametrize("name", ["proxy.example", "10.0.0.0/33", "", "10.0.0"])
def test_a_setting_that_is_no_address_is_refused(name: str) -> None:
    """It would trust nobody, and nobody would notice."""
    with pytest.raises(SettingsError, match="trusted_proxies"):
        checked(ServerSettings(trusted_proxies=(name,)))
