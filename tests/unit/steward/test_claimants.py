"""Tokens in the place of plugins' names."""

from __future__ import annotations

import re

import msgspec

from tidings.happenings.variants import (
    ClaimsRetracted,
    CustodyTaken,
    PluginEvent,
    RelationClaimSuppressionCollapsed,
    RelationForgotten,
    SubjectAddressingForcedRetract,
    SuppressionRecord,
)
from tidings.steward.claimants import Tokens

NAMES = ("org.example.player", "org.example.admin")


def test_happenings_have_tokens_where_names_were_and_no_name_is_left() -> None:
    """Each kind of name has its own key; records and reasons within are changed too; a plugin's own payload is left as it is."""
    tokens, (player, admin) = Tokens(b"k"), NAMES
    mine, its = tokens.token(player), tokens.token(admin)
    assert re.fullmatch(r"[A-Za-z0-9_-]{22}", mine)
    for happening, expected in (
        (
            CustodyTaken(at_ms=1, plugin=player, handle_id="h", shelf="a.b", custody_type="c"),
            {"claimant_token": mine, "handle_id": "h", "shelf": "a.b", "custody_type": "c"},
        ),
        (
            SubjectAddressingForcedRetract(
                at_ms=1, admin_plugin=admin, target_plugin=player, canonical_id="i", scheme="s", value="v", reason=None
            ),
            {
                "admin_token": its,
                "target_token": mine,
                "canonical_id": "i",
                "scheme": "s",
                "value": "v",
                "reason": None,
            },
        ),
        (
            RelationForgotten(
                at_ms=1,
                plugin=player,
                source_id="a",
                predicate="p",
                target_id="b",
                reason=ClaimsRetracted(retracting_plugin=player),
            ),
            {
                "claimant_token": mine,
                "source_id": "a",
                "predicate": "p",
                "target_id": "b",
                "reason": {"kind": "claims_retracted", "retracting_claimant_token": mine},
            },
        ),
        (
            RelationClaimSuppressionCollapsed(
                at_ms=1,
                admin_plugin=admin,
                subject_id="a",
                predicate="p",
                target_id="b",
                demoted_claimant=player,
                surviving_suppression_record=SuppressionRecord(admin, 0, None),
            ),
            {
                "admin_token": its,
                "subject_id": "a",
                "predicate": "p",
                "target_id": "b",
                "demoted_claimant_token": mine,
                "surviving_suppression_record": {"admin_token": its, "suppressed_at_ms": 0, "reason": None},
            },
        ),
        (
            PluginEvent(at_ms=1, plugin=player, event_type="e", payload={"plugin": "free"}),
            {"claimant_token": mine, "event_type": "e", "payload": {"plugin": "free"}},
        ),
    ):
        shown = tokens.shown(happening)
        assert shown.pop("type") == happening.variant
        assert shown.pop("at_ms") == 1
        assert shown == expected
        assert not any(name in msgspec.json.encode(shown).decode() for name in NAMES)


def test_a_token_is_the_same_each_time_and_another_with_another_key() -> None:
    """So it can be compared, and not be guessed from the name."""
    assert Tokens(b"k").token("a") == Tokens(b"k").token("a")
    assert Tokens(b"k").token("a") != Tokens(b"l").token("a")


def test_tokens_are_resolved_among_the_names_that_are_known() -> None:
    """What nobody knows is left out."""
    tokens = Tokens(b"k")
    wanted = [Tokens(b"k").token(name) for name in ("a", "b", "stranger")]
    assert tokens.resolve(wanted, ["a", "b", "c"]) == {wanted[0]: "a", wanted[1]: "b"}
