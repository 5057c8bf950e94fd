"""A token is verified once; all that can end it is asked every time."""

from __future__ import annotations

import pytest

from tidings.access.administration import TokenRevocation
from tidings.access.authentication import Authenticator
from tidings.access.book import AccessBook
from tidings.access.errors import AuthFailed, TokenExpired, TokenInvalid, TokenRevoked
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer, TokenVerifier
from tidings.testing import VirtualClock

from .support import record_of

SECRET = "a secret for tests that is longer than 32 bytes"
OTHER = "another secret for tests, also longer than 32 bytes"


class World:
    """An authenticator, and tokens for it."""

    def __init__(self) -> None:
        self.clock = VirtualClock()
        self.verifier = TokenVerifier(TokenSettings(secret=SECRET, leeway_s=0), self.clock)
        self.book = AccessBook()
        self.book.trust(self.verifier.trusts)
        self.authenticator = Authenticator(self.verifier, self.book, self.clock)
        self.issuer = TokenIssuer(TokenSettings(secret=SECRET, leeway_s=0), self.clock)


def test_the_same_token_gives_the_same_capsule() -> None:
    """Decisions that were made for one request are there for the next."""
    world = World()
    token = world.issuer.issue("alice")

    assert world.authenticator.of_token(token) is world.authenticator.of_token(token)


def test_a_token_that_was_good_is_refused_when_it_has_expired() -> None:
    """That it was verified before does not keep it alive."""
    world = World()
    token = world.issuer.issue("alice", lifetime_s=60)
    world.authenticator.of_token(token)
    world.clock.jump(61)

    with pytest.raises(TokenExpired):
        world.authenticator.of_token(token)


def test_a_token_that_was_good_is_refused_when_its_key_or_the_rules_for_tokens_are_others() -> None:
    """After a reload every token is verified again."""
    world = World()
    token = world.issuer.issue("alice", lifetime_s=3_600)
    world.authenticator.of_token(token)
    world.verifier.reload(TokenSettings(secret=SECRET, leeway_s=0, lifetime_s_max=60))
    with pytest.raises(TokenInvalid):
        world.authenticator.of_token(token)
    world.verifier.reload(TokenSettings(secret=OTHER, leeway_s=0))

    with pytest.raises(AuthFailed):
        world.authenticator.of_token(token)


def test_a_token_that_was_good_is_refused_when_it_is_revoked() -> None:
    """A revocation counts from the next request on."""
    world = World()
    token = world.issuer.issue("alice")
    capsule = world.authenticator.of_token(token)
    world.book.apply(record_of(1, TokenRevocation(token_id=str(capsule.context.token_id))))

    with pytest.raises(TokenRevoked):
        world.authenticator.of_token(token)


def test_a_token_with_another_signature_is_not_taken_for_one_that_was_good() -> None:
    """What is remembered is the whole token."""
    world = World()
    token = world.issuer.issue("alice")
    world.authenticator.of_token(token)

    with pytest.raises(TokenInvalid):
        world.authenticator.of_token(token[:-2] + ("AA" if token[-2:] != "AA" else "BB"))
