"""The book is what the access records say, and the worst they could say where they cannot be read."""

from __future__ import annotations

import logging
from typing import Any

import msgspec
import pytest

from tests.unit.access.support import bearer, book_of, raw_record, record_of
from tidings.access.administration import (
    Change,
    Dismissed,
    Grant,
    PolicyPut,
    PolicyRemoved,
    Revoke,
    SubjectRestored,
    SubjectRevoked,
    TokenRevocation,
    event_of,
)
from tidings.access.book import AccessBook, load_book
from tidings.access.errors import InvalidChange, InvalidPolicy
from tidings.access.resources import Action, ResourceKind, ResourcePattern, node, partition, pattern_from_text, topic
from tidings.access.settings import AccessSettings
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.log.interface import TopicInfo
from tidings.log.memory import MemoryLog
from tidings.log.record import Sealed
from tidings.log.retention import RetentionPlan, SegmentDecision
from tidings.log.settings import LogSettings

P1 = partition("p1")
ALICE = bearer()
ADMIN = bearer("root", roles=frozenset({"admin"}))


def grant(text: str = "partition:p1", *, subject: str = "alice", action: Action = Action.SYNC) -> Grant:
    return Grant(subject=subject, action=action, resource=pattern_from_text(text))


def revoke(text: str = "partition:p1", *, subject: str = "alice", action: Action = Action.SYNC) -> Revoke:
    return Revoke(subject=subject, action=action, resource=pattern_from_text(text))


def allowed(book: AccessBook, *names: str) -> list[str]:
    """Which of the partitions alice may sync."""
    capsule = book.capsule(ALICE)
    return [name for name in names if capsule.allows(Action.SYNC, partition(name))]


# Grants and revocations


def test_nothing_is_allowed_by_default() -> None:
    """An empty book denies everything to a token without claims."""
    capsule = AccessBook().capsule(ALICE)

    assert not any(capsule.allows(action, each) for action in Action for each in (P1, topic("a"), node()))


def test_a_grant_gives_exactly_itself() -> None:
    """Another action, resource, kind or subject stays denied."""
    book = book_of(grant())

    assert book.capsule(ALICE).allows(Action.SYNC, P1)
    assert not book.capsule(ALICE).allows(Action.SUBMIT, P1)
    assert not book.capsule(ALICE).allows(Action.SYNC, partition("p2"))
    assert not book.capsule(ALICE).allows(Action.SYNC, topic("p1"))
    assert not book.capsule(bearer("bob")).allows(Action.SYNC, P1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ([grant(), revoke()], []),
        ([grant(), revoke(), grant()], ["p1"]),
        ([revoke(), grant()], ["p1"]),
        ([grant("partition:p*")], ["p1", "p2"]),
        ([grant("partition:*")], ["p1", "p2", "q"]),
        ([grant("partition:p*"), revoke("partition:p1")], ["p2"]),
        ([grant("partition:p1"), revoke("partition:p*")], []),
        ([revoke("partition:p*"), grant("partition:p1")], ["p1"]),
        ([revoke("partition:p1"), grant("partition:p*")], ["p1", "p2"]),
        ([grant("partition:*"), revoke("partition:p*"), grant("partition:p2")], ["p2", "q"]),
    ],
)
def test_the_last_record_about_something_wins(changes: list[Change], expected: list[str]) -> None:
    """Grants and revocations, exact and by prefix, act as if carried out one after another."""
    assert allowed(book_of(*changes), "p1", "p2", "q") == expected


def test_a_revocation_beats_claims_roles_and_policies() -> None:
    """What a token, a role or a policy gives is gone with the revocation, and back with a grant."""
    bearers = [bearer(partitions=frozenset({"p1"})), bearer(roles=frozenset({"admin"})), ALICE]
    permit = PolicyPut(policy_id="all", text='permit (principal == Subject::"alice", action, resource);')

    for context in bearers:
        assert book_of(permit).capsule(context).allows(Action.SYNC, P1)
        assert not book_of(permit, revoke()).capsule(context).allows(Action.SYNC, P1)
        assert book_of(permit, revoke(), grant()).capsule(context).allows(Action.SYNC, P1)


def test_spellings_of_one_name_are_one_resource() -> None:
    """A grant for the one Unicode form serves the other, and so does its revocation."""
    composed, combining = "caf\u00e9", "cafe\u0301"
    book = book_of(
        Grant(subject="alice", action=Action.SYNC, resource=ResourcePattern(ResourceKind.PARTITION, combining))
    )
    assert allowed(book, composed, combining) == [composed, combining]

    book.apply(record_of(2, revoke(f"partition:{composed}")))

    assert allowed(book, composed, combining) == []


def test_a_revoked_token_is_worth_nothing() -> None:
    """Only the token with that id; another token of the same subject stays good."""
    book = book_of(TokenRevocation(token_id="t1"))
    lost, kept, nameless = (
        book.capsule(bearer(token_id=each, partitions=frozenset({"p1"}))) for each in ("t1", "t2", None)
    )

    assert (lost.is_revoked, lost.allows(Action.SYNC, P1)) == (True, False)
    assert (kept.is_revoked, kept.allows(Action.SYNC, P1)) == (False, True)
    assert (nameless.is_revoked, nameless.allows(Action.SYNC, P1)) == (False, True)


def test_a_revoked_subject_may_do_nothing_until_it_is_restored() -> None:
    """Grants made meanwhile do not bring it back by themselves; restoring does, with all that it has."""
    book = book_of(grant(), SubjectRevoked(subject="alice"), grant("partition:p2"))
    capsule = book.capsule(ALICE)
    assert (capsule.is_revoked, allowed(book, "p1", "p2")) == (True, [])
    assert book.revoked_subjects() == ["alice"]

    book.apply(record_of(4, SubjectRestored(subject="alice")))

    assert (capsule.is_revoked, allowed(book, "p1", "p2")) == (False, ["p1", "p2"])


def test_the_seq_is_the_last_records() -> None:
    """The book says up to where it has read; what comes again or from other topics changes nothing."""
    book = book_of(grant())
    book.committed([raw_record(2, "NOTED", {}, topic="demo"), record_of(3, grant("partition:p2"))])
    assert (book.seq, allowed(book, "p1", "p2")) == (3, ["p1", "p2"])

    book.apply(record_of(3, revoke()))
    book.apply(record_of(2, revoke()))

    assert (book.seq, allowed(book, "p1", "p2")) == (3, ["p1", "p2"])


def test_rules_can_be_listed() -> None:
    """Every grant and revocation in force, with its seq."""
    book = book_of(grant(), grant("topic:a*", subject="bob", action=Action.READ), revoke())

    assert [(subject, str(rule.resource), rule.is_grant, rule.seq) for subject, rule in book.rules()] == [
        ("alice", "partition:p1", False, 3),
        ("bob", "topic:a*", True, 2),
    ]
    assert [subject for subject, _ in book.rules("bob")] == ["bob"]
    assert list(book.rules("nobody")) == []


# Policies


def test_policies_come_and_go() -> None:
    """A policy is in force from its record to the one that replaces or removes it."""
    book = book_of(PolicyPut(policy_id="a", text="permit (principal, action, resource);"))
    capsule = book.capsule(ALICE)
    assert capsule.allows(Action.SYNC, P1)

    book.apply(record_of(2, PolicyPut(policy_id="a", text='permit (principal, action == Action::"read", resource);')))
    assert not capsule.allows(Action.SYNC, P1)
    assert capsule.allows(Action.READ, P1)

    book.apply(record_of(3, PolicyRemoved(policy_id="a")))
    assert not capsule.allows(Action.READ, P1)
    assert book.policies == {}


@pytest.mark.parametrize("text", ["permit (principal", "", 'permit (principal == Old::"x", action, resource);'])
def test_a_stored_policy_that_is_no_longer_valid_denies_everything(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """It might have been a forbid: nobody gets anything until it is put anew or removed, and it is reported."""
    book = book_of(grant())
    capsules = [book.capsule(ALICE), book.capsule(ADMIN)]

    book.apply(record_of(2, PolicyPut(policy_id="broken", text=text)))

    assert [capsule.allows(Action.SYNC, P1) for capsule in capsules] == [False, False]
    assert "'broken'" in book.closed_by()[0]
    assert (book.problems[-1].seq, book.problems[-1].type) == (2, "access.policy_put")
    assert "everything is denied" in caplog.text
    book.apply(record_of(3, PolicyRemoved(policy_id="broken")))
    assert [capsule.allows(Action.SYNC, P1) for capsule in capsules] == [True, True]
    assert book.closed_by() == ()


# What cannot be read


def test_a_grant_that_cannot_be_read_gives_nothing() -> None:
    """Whatever is wrong with it: no right, one problem reported, and the rest goes on."""
    good = {"subject": "alice", "action": "sync", "resource": {"kind": "partition", "name": "p1"}}
    bad: list[Any] = [
        b"{}",
        b"[]",
        {**good, "subject": ""},
        {**good, "subject": ["alice"]},
        {**good, "subject": "a\u0000"},
        {**good, "action": "everything"},
        {**good, "resource": "partition:p1"},
        {**good, "resource": {"kind": "planet", "name": "p1"}},
        {**good, "resource": {"kind": "partition", "name": ""}},
        {**good, "resource": {"kind": "partition", "name": "p1", "match": "regex"}},
        {**good, "until": "2020-01-01"},
        {**good, "type": "access.revoke"},
    ]
    book = AccessBook()

    for seq, payload in enumerate(bad, 1):
        book.apply(raw_record(seq, "access.grant", payload))

    assert [problem.seq for problem in book.problems] == list(range(1, len(bad) + 1))
    assert allowed(book, "p1") == []
    assert book.closed_by() == ()
    book.apply(raw_record(len(bad) + 1, "access.grant", good))
    assert allowed(book, "p1") == ["p1"]


@pytest.mark.parametrize("kind", ["access.revoke", "access.subject_revoked"])
def test_a_revocation_that_names_its_subject_only_revokes_the_subject(kind: str) -> None:
    """What was to be revoked is not known, so all of it is; others are not concerned."""
    book = book_of(grant(), grant(subject="bob"))

    book.apply(raw_record(3, kind, {"subject": "alice", "action": "dance"}))

    assert allowed(book, "p1") == []
    assert book.capsule(ALICE).is_revoked
    assert book.capsule(bearer("bob")).allows(Action.SYNC, P1)
    book.apply(record_of(4, SubjectRestored(subject="alice")))
    assert allowed(book, "p1") == ["p1"]


SEALED = Sealed("A256GCM", "k", "n")


@pytest.mark.parametrize(
    ("kind", "payload", "sealed"),
    [
        ("access.revoke", {}, None),
        ("access.revoke", [], None),
        ("access.revoke", {"subject": 7}, None),
        ("access.revoke", "c2VhbGVk", SEALED),
        ("access.subject_revoked", {"subject": ""}, None),
        ("access.token_revoked", {"token": "t1"}, None),
        ("access.policy_put", {"text": "permit (principal, action, resource);"}, None),
        ("access.policy_removed", {"policy_id": "a", "when": "later"}, None),
        ("access.role_revoked", {"role": "x"}, None),
    ],
)
def test_a_record_that_might_have_taken_something_away_closes_the_book(
    kind: str, payload: Any, sealed: Sealed | None
) -> None:
    """Nobody gets anything until an operator has looked at the record and dismissed it."""
    book = book_of(grant())
    capsules = [book.capsule(ALICE), book.capsule(ADMIN)]
    assert all(capsule.allows(Action.SYNC, P1) for capsule in capsules)

    book.apply(raw_record(2, kind, payload, sealed=sealed))

    assert not any(capsule.allows(Action.SYNC, P1) for capsule in capsules)
    assert "seq 2" in book.closed_by()[0]
    book.apply(record_of(3, Dismissed(seq=7)))
    assert not any(capsule.allows(Action.SYNC, P1) for capsule in capsules)
    book.apply(record_of(4, Dismissed(seq=2)))
    assert all(capsule.allows(Action.SYNC, P1) for capsule in capsules)


def test_a_policy_whose_record_cannot_be_read_is_mended_by_its_name() -> None:
    """The name is legible, so putting it anew opens the book again."""
    book = book_of(grant())
    book.apply(raw_record(2, "access.policy_put", {"policy_id": "a", "text": 7}))
    assert allowed(book, "p1") == []

    book.apply(record_of(3, PolicyPut(policy_id="a", text='permit (principal, action, resource == Topic::"x");')))

    assert allowed(book, "p1") == ["p1"]


def test_a_record_of_no_access_type_is_reported_only() -> None:
    """No version of ours writes such a type here, so it took nothing away."""
    book = book_of(grant())

    book.apply(raw_record(2, "NOTED", {"text": "hello"}))

    assert allowed(book, "p1") == ["p1"]
    assert book.problems[-1].type == "NOTED"


def test_problems_are_bounded_and_many_unreadable_records_keep_the_book_closed() -> None:
    """The last hundred problems are kept; what is forgotten does not open the book."""
    book = AccessBook()
    for seq in range(1, 151):
        book.apply(raw_record(seq, "access.revoke", {}))

    assert len(book.problems) == 100
    for seq in range(1, 151):
        book.apply(record_of(150 + seq, Dismissed(seq=seq)))
    assert book.closed_by() != ()


def test_a_book_that_missed_the_beginning_is_closed() -> None:
    """If the first access records were dropped from the log, a revocation may have been among them."""
    book = AccessBook()
    event = event_of(grant(), actor="test")

    book.apply(raw_record(9, "access.grant", dict(event.payload), offset=3))

    assert allowed(book, "p1") == []
    assert "first 3 access records" in book.closed_by()[0]


# Bounds


def test_grants_beyond_the_bound_have_no_effect_and_revocations_do() -> None:
    """A full book takes no further grants, still takes revocations, and closes when there are too many of those."""
    book = book_of(*(grant(f"partition:p{n}") for n in range(3)), settings=AccessSettings(rules_count_max=2))
    assert allowed(book, "p0", "p1", "p2") == ["p0", "p1"]
    claims = bearer(partition_prefixes=("q",))
    for seq in (4, 5):
        book.apply(record_of(seq, revoke(f"partition:q{seq}")))
        assert not book.capsule(claims).allows(Action.SYNC, partition(f"q{seq}"))
    assert book.capsule(claims).allows(Action.SYNC, partition("q9"))
    assert allowed(book, "p0") == ["p0"]
    capsule = book.capsule(ALICE)
    assert capsule.allows(Action.SYNC, partition("p0"))

    book.apply(record_of(6, revoke("partition:q6")))

    assert not capsule.allows(Action.SYNC, partition("p0"))
    assert "more than can be kept" in book.closed_by()[0]


def test_a_rule_can_be_replaced_in_a_full_book() -> None:
    """What has a place already needs no further one."""
    book = book_of(grant(), revoke(), grant(), settings=AccessSettings(rules_count_max=1))

    assert allowed(book, "p1") == ["p1"]
    assert not book.problems


def test_a_policy_beyond_the_bound_denies_everything() -> None:
    """It is in the log and cannot be put into force: removing one makes room for putting it anew."""
    text = 'forbid (principal, action, resource == Topic::"x");'
    settings = AccessSettings(policies_count_max=1)
    book = book_of(grant(), PolicyPut(policy_id="a", text=text), PolicyPut(policy_id="b", text=text), settings=settings)

    assert allowed(book, "p1") == []
    book.apply(record_of(4, PolicyRemoved(policy_id="b")))
    assert allowed(book, "p1") == ["p1"]


def test_a_stored_policy_that_is_not_in_nfc_denies_everything() -> None:
    """It was meant to forbid something and would match no name; put again in NFC, it forbids that, and the book is open."""
    text = 'forbid (principal == Subject::"e\u0301ve", action, resource);'
    book = book_of(grant(), PolicyPut(policy_id="a", text=text))

    assert allowed(book, "p1") == []
    assert "NFC" in book.closed_by()[0]
    book.apply(record_of(3, PolicyPut(policy_id="a", text=text.replace("e\u0301", "\u00e9"))))
    assert allowed(book, "p1") == ["p1"]
    assert not book.capsule(bearer("\u00e9ve", roles=frozenset({"admin"}))).allows(Action.READ, topic("a"))


# Checking before storing


@pytest.mark.parametrize(
    "change",
    [
        PolicyRemoved(policy_id="nothing"),
        PolicyPut(policy_id="tidings.granted", text="permit (principal, action, resource);"),
        PolicyPut(policy_id="third", text="permit (principal, action, resource);"),
        Dismissed(seq=1),
        grant("partition:p9"),
        grant(subject="a\nb"),
    ],
    ids=repr,
)
def test_a_change_that_would_have_no_effect_is_refused_before_it_is_stored(change: Change) -> None:
    """What is not there, what there is no room for, and what makes no sense is refused in time."""
    policies = [PolicyPut(policy_id=name, text="permit (principal, action, resource);") for name in ("a", "b")]
    book = book_of(*policies, grant(), settings=AccessSettings(policies_count_max=2, rules_count_max=1))

    with pytest.raises(InvalidChange):
        book.check(change)


def test_a_bad_policy_is_refused_before_it_is_stored() -> None:
    """The text is checked as it will be when it is read back."""
    with pytest.raises(InvalidPolicy):
        AccessBook().check(PolicyPut(policy_id="a", text="permit (principal"))


def test_a_good_change_is_given_back_in_its_normal_form() -> None:
    """Checking changes nothing but the spelling."""
    given = PolicyPut(policy_id="cafe\u0301", text="permit (principal, action, resource);")

    assert AccessBook().check(given) == msgspec.structs.replace(given, policy_id="caf\u00e9")


# From a log


async def test_a_book_is_loaded_from_a_log() -> None:
    """All access records of a log, and only those."""
    log = MemoryLog()
    await log.append(event_of(grant(), actor="test"))
    await log.append(Event(EventMeta("demo", "NOTED", "s"), {}))
    await log.append(event_of(revoke(), actor="test"))
    await log.append(event_of(grant("partition:p2"), actor="test"))

    book = await load_book(log)

    assert (book.seq, allowed(book, "p1", "p2")) == (4, ["p2"])
    await log.close()


async def test_a_log_that_dropped_its_first_access_records_gives_a_closed_book() -> None:
    """Retention took a segment of the topic, so a revocation may be gone; what is left does not count."""
    log = MemoryLog(LogSettings(segment_lines_max=2))
    for name in ("p1", "p2", "p3"):
        await log.append(event_of(grant(f"partition:{name}"), actor="test"))
    sealed = log.topics()["access"].segments[0]
    await log.drop(RetentionPlan((SegmentDecision(segment=sealed, drops=True, reason="a test"),)))

    book = await load_book(log)

    assert allowed(book, "p3") == []
    assert "first 2 access records" in book.closed_by()[0]
    await log.close()


async def test_a_log_that_dropped_all_access_records_gives_a_closed_book() -> None:
    """With no record left to notice it by, the topic's bounds still tell."""

    class Emptied(MemoryLog):
        def topics(self) -> dict[str, TopicInfo]:
            return {"access": TopicInfo("access", 3, 3, 0, 9, 0, ())}

        def topic(self, name: str) -> TopicInfo | None:
            return self.topics().get(name)

    log = Emptied()

    book = await load_book(log)

    assert not book.capsule(ADMIN).allows(Action.SYNC, P1)
    assert "first 3 access records" in book.closed_by()[0]
    await log.close()


def test_open_access_says_so(caplog: pytest.LogCaptureFixture) -> None:
    """Open is loud, and a revocation still counts."""
    with caplog.at_level(logging.WARNING):
        book = book_of(revoke(), settings=AccessSettings(is_open=True))

    assert "access is open" in caplog.text
    assert allowed(book, "p1", "p2") == ["p2"]


def test_settings_out_of_range_are_refused() -> None:
    """A bound of zero is a mistake, and its path is named."""
    with pytest.raises(SettingsError) as caught:
        AccessBook(AccessSettings(rules_count_max=0))
    assert caught.value.path == "access.rules_count_max"
