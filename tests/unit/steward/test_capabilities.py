"""Who gets which capability on the steward's socket."""

from __future__ import annotations

from pathlib import Path

import pytest

from tidings.core.errors import SettingsError
from tidings.steward.capabilities import CAPABILITIES, CapabilityPolicy, PeerCredentials, load_policy
from tidings.wire.steward.requests import REQUESTS

OWN, OTHER = 1000, 2000


def peer(uid: int = OTHER, gid: int = 50, groups: frozenset[int] = frozenset()) -> PeerCredentials:
    return PeerCredentials(1, uid, gid, groups)


def policy(tmp_path: Path, text: str) -> CapabilityPolicy:
    file = tmp_path / "policy.toml"
    file.write_text(text)
    return load_policy(file, OWN)


def test_every_capability_is_needed_by_an_operation() -> None:
    """What can be negotiated is what some operation takes."""
    assert set(CAPABILITIES) == {kind.capability for kind in REQUESTS.values()} - {None}
    assert {"resolve_claimants", "appointments_admin", "watches_admin", "grammar_admin"} <= set(CAPABILITIES)


def test_without_a_file_only_the_user_who_runs_the_node_gets_any() -> None:
    """The default grants by the user id; a peer that the kernel does not name, and a capability that there is not, get nothing."""
    default = load_policy(None, OWN)
    assert default.grants("ledger_admin", peer(uid=OWN))
    assert not default.grants("ledger_admin", peer())
    assert not default.grants("ledger_admin", None)
    assert not default.grants("no_such", peer(uid=OWN))


@pytest.mark.parametrize(
    ("rule", "who", "is_granted"),
    [
        ("allow_local = true", peer(), True),
        ("allow_uids = [2000]", peer(), True),
        ("allow_uids = [2001]", peer(), False),
        ("allow_gids = [50]", peer(), True),
        ("allow_gids = [60]", peer(groups=frozenset({60})), True),
        ("allow_gids = [60]", peer(), False),
        ("", peer(), False),
        ("", peer(uid=OWN), True),
        ("allow_local = true", None, False),
    ],
)
def test_a_table_grants_one_capability_to_whom_it_names(
    tmp_path: Path, rule: str, who: PeerCredentials | None, is_granted: bool
) -> None:
    """By user, by group, by a further group, or to whoever can open the socket; other capabilities keep the default."""
    found = policy(tmp_path, f"[capabilities.watches_admin]\n{rule}\n")
    assert found.grants("watches_admin", who) is is_granted
    assert found.grants("grammar_admin", who) is (who is not None and who.uid == OWN)


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[capabilities.watches_admin]\nallow_uds = [1]\n", "allow_uds"),
        ("[capabilities.watch_admin]\n", "watch_admin"),
        ("[capability.watches_admin]\n", "capability"),
        ("[capabilities.watches_admin]\nallow_uids = 'me'\n", "allow_uids"),
        ("not toml", "TOML"),
    ],
)
def test_a_policy_with_anything_unknown_stops_the_start_and_is_named(tmp_path: Path, text: str, named: str) -> None:
    """A misspelt key, capability or section is no rule that silently does nothing."""
    with pytest.raises(SettingsError) as refused:
        policy(tmp_path, text)
    assert named in str(refused.value)


def test_a_policy_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    """So does a file that cannot be read."""
    with pytest.raises(SettingsError):
        load_policy(tmp_path / "none.toml", OWN)
