"""Access settings: which tokens are believed, and how much is kept in memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Literal

import msgspec

from tidings.core.settings import Settings

SECRET_BYTES_MIN = 32
"""HS256 is as strong as its secret, up to this length."""

Algorithm = Literal["HS256", "EdDSA", "ES256", "RS256"]


class TokenSettings(Settings, frozen=True, kw_only=True):
    """Which tokens are believed. Without a secret and without a key set, none is."""

    secret: str | None = None
    """The secret of HS256, at least 32 bytes of it. Whoever has it can make tokens."""
    key_set: str | None = None
    """A JSON Web Key Set with public keys: Ed25519 (EdDSA), P-256 (ES256), RSA of 2048 bits and more (RS256)."""
    algorithms: tuple[Algorithm, ...] = ("HS256", "EdDSA", "ES256", "RS256")
    """Of these, the ones that are taken; each only with a key of its own kind."""
    audience: str | None = None
    """Tokens must name this audience. Without it, a token that names any audience is meant for somebody else."""
    issuer: str | None = None
    """Tokens must name this issuer."""
    leeway_s: Annotated[int, msgspec.Meta(ge=0, le=600)] = 30
    """How far the clocks of issuer and node may be apart."""
    lifetime_s_max: Annotated[int, msgspec.Meta(ge=1, le=366 * 86_400)] = 30 * 86_400
    """The longest time between a token's issue and its end; one that lives longer, or for ever, is refused."""
    token_bytes_max: Annotated[int, msgspec.Meta(ge=256, le=1 << 20)] = 16_384
    """A longer token is refused before anything is decoded."""

    def __repr__(self) -> str:
        secret = "None" if self.secret is None else "<secret>"
        return f"TokenSettings(secret={secret}, algorithms={self.algorithms!r}, audience={self.audience!r}, issuer={self.issuer!r})"

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """A secret that is too short."""
        if self.secret is not None and len(self.secret.encode(errors="surrogatepass")) < SECRET_BYTES_MIN:
            yield "secret", f"is shorter than {SECRET_BYTES_MIN} bytes"


class AccessSettings(Settings, frozen=True, kw_only=True):
    """How access is decided."""

    is_open: bool = False
    """Let everybody do everything that is not forbidden. For demonstrations on one machine; it says so in the log."""
    tokens: TokenSettings = TokenSettings()
    decisions_count_max: Annotated[int, msgspec.Meta(ge=1, le=1_000_000)] = 1_024
    """Decisions that one capsule remembers; with more it forgets all and decides anew."""
    rules_count_max: Annotated[int, msgspec.Meta(ge=1, le=100_000_000)] = 1_000_000
    """Grants and revocations in force. Further grants have no effect; revocations have, up to twice as many, and beyond
    that everything is denied."""
    policies_count_max: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 256
    """Stored policies. Further ones are refused; if one is found in the log, everything is denied."""
    policies_bytes_max: Annotated[int, msgspec.Meta(ge=64, le=1 << 24)] = 131_072
    """The texts of all stored policies together; a further one is refused. Each decision takes longer with more of them."""
    policy_bytes_max: Annotated[int, msgspec.Meta(ge=64, le=65_536)] = 16_384
    """The text of one policy."""

    @property
    def can_authenticate(self) -> bool:
        """Whether anybody can get in: by a key, or because access is open."""
        return self.is_open or self.tokens.secret is not None or self.tokens.key_set is not None
