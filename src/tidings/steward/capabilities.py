"""
Capabilities: what a client must have been granted before it may do more than read and ask.

On the Unix socket the kernel says who the peer is, and a table decides:

    [capabilities.appointments_admin]
    allow_local = false      # whoever can open the socket
    allow_uids = [1000]
    allow_gids = [27]

A capability without a table, and everyone without such a file, gets the default: the user who runs the node. A peer that the kernel does not
name gets nothing. A key or a capability that is not known stops the start: a misspelt rule must not go unnoticed.

At ``/happenings`` the rights of the token decide (``authority``).
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Final

import msgspec

from tidings.core.errors import SettingsError
from tidings.core.validation import explain
from tidings.wire.steward.requests import REQUESTS

CAPABILITIES: Final = tuple(dict.fromkeys(each.capability for each in REQUESTS.values() if each.capability is not None))
"""Every capability; each is needed by at least one operation."""
_POLICY_BYTES_MAX: Final = 1 << 20


class PeerCredentials(msgspec.Struct, frozen=True):
    """Who is at the other end of a Unix socket, as the kernel knows."""

    pid: int
    uid: int
    gid: int
    groups: frozenset[int] = frozenset()
    """Further groups, where they could be found."""


class CapabilityRule(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Who gets a capability, beside the user who runs the node."""

    allow_local: bool = False
    """Whoever can open the socket."""
    allow_uids: frozenset[int] = frozenset()
    allow_gids: frozenset[int] = frozenset()

    def admits(self, peer: PeerCredentials, own_uid: int) -> bool:
        """Whether this peer gets it."""
        return (
            self.allow_local
            or peer.uid == own_uid
            or peer.uid in self.allow_uids
            or peer.gid in self.allow_gids
            or not self.allow_gids.isdisjoint(peer.groups)
        )


class _PolicyFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    capabilities: dict[str, CapabilityRule] = {}


class CapabilityPolicy:
    """
    Which peer of the socket gets which capability.

    Args:
        own_uid: The user who runs the node.
        rules: By capability; the default holds for the others.
    """

    def __init__(self, own_uid: int, rules: Mapping[str, CapabilityRule] | None = None) -> None:
        self._own_uid = own_uid
        self._rules = dict(rules or {})

    def grants(self, capability: str, peer: PeerCredentials | None) -> bool:
        """Whether a peer may have a capability."""
        if peer is None or capability not in CAPABILITIES:
            return False
        return self._rules.get(capability, _DEFAULT).admits(peer, self._own_uid)


_DEFAULT: Final = CapabilityRule()


def load_policy(path: Path | None, own_uid: int) -> CapabilityPolicy:
    """
    The policy in a file; the default if there is none.

    Raises:
        SettingsError: The file cannot be read, or says something that is not known.
    """
    if path is None:
        return CapabilityPolicy(own_uid)
    try:
        with path.open("rb") as file:
            text = file.read(_POLICY_BYTES_MAX + 1)
        if len(text) > _POLICY_BYTES_MAX:
            raise SettingsError(str(path), f"is longer than {_POLICY_BYTES_MAX} bytes")
        found = msgspec.convert(tomllib.loads(text.decode()), _PolicyFile)
    except OSError as error:
        raise SettingsError(str(path), f"cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise SettingsError(str(path), f"is not TOML: {error}") from error
    except msgspec.ValidationError as error:
        problem, place = explain(error)
        raise SettingsError(str(path), f"{place or 'the file'}: {problem}") from error
    for name in found.capabilities:
        if name not in CAPABILITIES:
            raise SettingsError(
                str(path), f"there is no capability {name!r}", hint=f"there are: {', '.join(CAPABILITIES)}"
            )
    return CapabilityPolicy(own_uid, found.capabilities)
