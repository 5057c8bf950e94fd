"""
How plugins are called on the wire: by their names, or by tokens that hide them.

A token is 22 characters of URL-safe base64 over a keyed hash of the name. The key is made once for a workspace and stays there; without it
nobody can try names out. ``resolve_claimants`` gives the names behind tokens to whoever may have them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Generator, Iterable, Mapping
from typing import Any, Final

import msgspec

from tidings.core.tasks import finish, in_slices

_TOKEN_KEYS: Final = {
    "plugin": "claimant_token",
    "admin_plugin": "admin_token",
    "target_plugin": "target_token",
    "retracting_plugin": "retracting_claimant_token",
    "demoted_claimant": "demoted_claimant_token",
    "claimant": "claimant_token",
    "claimants": "claimant_tokens",
    "relation_claimants": "relation_claimant_tokens",
}
"""Where names are, and what the key is called where tokens are."""
_FREE_FORM: Final = frozenset({"payload", "state", "prev_state", "new_state"})
"""JSON of plugins' own: its keys mean nothing here."""
_TOKEN_BYTES: Final = 16
_SLICE_COUNT: Final = 64


class Names:
    """Plugins are called by their names."""

    def shown(self, value: Any) -> Any:
        """A happening or a part of an answer, as it is sent."""
        return value

    async def shown_in_slices(self, value: Any) -> Any:
        """As ``shown``, for what is large: other callbacks run in between."""
        return value


class Tokens(Names):
    """
    Plugins are called by tokens.

    Args:
        key: Of this workspace.
    """

    def __init__(self, key: bytes) -> None:
        self._key = key
        self._names: dict[str, str] = {}

    def token(self, name: str) -> str:
        """The token of a name."""
        digest = hashlib.blake2b(name.encode(), key=self._key, digest_size=_TOKEN_BYTES).digest()
        token = base64.urlsafe_b64encode(digest).rstrip(b"=").decode()
        self._names[token] = name
        return token

    def resolve(self, tokens: Iterable[str], names: Iterable[str]) -> Mapping[str, str]:
        """The names behind tokens, of those that were given out and of ``names``; others are left out."""
        wanted = set(tokens)
        if not wanted <= self._names.keys():
            for name in names:
                self.token(name)
        return {token: self._names[token] for token in wanted if token in self._names}

    def shown(self, value: Any) -> Any:
        return finish(self._hidden(msgspec.to_builtins(value), [0]))

    async def shown_in_slices(self, value: Any) -> Any:
        return await in_slices(self._hidden(msgspec.to_builtins(value), [0]))

    def _hidden(self, value: Any, work: list[int]) -> Generator[None, None, Any]:
        """Hide names in a value; ``work`` counts members since the last slice."""
        if isinstance(value, list | tuple):
            items = list(value)
            for index, item in enumerate(items):
                if isinstance(item, dict | list | tuple):
                    items[index] = yield from self._hidden(item, work)
            return items
        if not isinstance(value, dict):
            return value
        members = {}
        for name, member in value.items():
            key = _TOKEN_KEYS.get(name)
            if key is not None and member is not None:
                members[key] = (
                    [self.token(name) for name in member] if isinstance(member, list | tuple) else self.token(member)
                )
            elif name in _FREE_FORM or not isinstance(member, dict | list | tuple):
                members[name] = member
            else:
                members[name] = yield from self._hidden(member, work)
        work[0] += 1
        if work[0] >= _SLICE_COUNT:
            work[0] = 0
            yield
        return members
