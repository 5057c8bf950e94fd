"""
How plugins are called on the wire: by their names, or by tokens that hide them.

A token is 22 characters of URL-safe base64 over a keyed hash of the name. The key is made once for a workspace and stays there; without it
nobody can try names out. ``resolve_claimants`` gives the names behind tokens to whoever may have them.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping
from typing import Any, Final

import msgspec

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


class Names:
    """Plugins are called by their names."""

    def shown(self, value: Any) -> Any:
        """A happening or a part of an answer, as it is sent."""
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
        return self._hidden(msgspec.to_builtins(value))

    def _hidden(self, value: Any) -> Any:
        if isinstance(value, dict):
            return dict(self._member(name, each) for name, each in value.items())
        if isinstance(value, list | tuple):
            return [self._hidden(each) for each in value]
        return value

    def _member(self, name: str, value: Any) -> tuple[str, Any]:
        key = _TOKEN_KEYS.get(name)
        if key is None or value is None:
            return name, value if name in _FREE_FORM else self._hidden(value)
        if isinstance(value, list | tuple):
            return key, [self.token(each) for each in value]
        return key, self.token(value)
