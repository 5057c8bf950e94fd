"""``tidings subject | relation | custody | appointment | watch | grammar`` and ``tidings happenings tail``, through a node and without one."""

from __future__ import annotations

import asyncio
import json
import os
import re
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import SMALL_SEGMENTS, Process, invoke, lines, started
from tests.integration.steward.test_steward_process import CATALOGUE, serve
from tidings.access.context import TokenClaims
from tidings.access.settings import TokenSettings
from tidings.access.tokens import TokenIssuer
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.embedded import open_log

PLUGIN = "org.example.library"
SECRET = "a secret of at least thirty-two bytes!"
ACTION = '{"topic": "alarms", "event_type": "RING", "space": "shared:home", "payload": {}}'


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Process, Path]]:
    """A node's process with a steward socket, and its workspace."""
    folder = tmp_path_factory.mktemp("node")
    with started(*serve(folder)) as process:
        assert process.json()["url"]
        yield process, folder / "workspace"


def ok(*args: object, **options: Any) -> Any:
    """What a command line says with ``--json``."""
    result = invoke(*args, "--json", **options)
    assert result.exit_code == 0, result.output + result.stderr
    found = lines(result.stdout)
    return found[0] if len(found) == 1 else found


def refusal(*args: object, **options: Any) -> dict[str, Any]:
    """The error that a command line ends with."""
    result = invoke(*args, "--json", **options)
    assert result.exit_code == 1, result.output
    error: dict[str, Any] = json.loads(result.stderr)["error"]
    return error


def token(**claims: Any) -> dict[str, str]:
    issuer = TokenIssuer(TokenSettings(secret=SECRET), SYSTEM_CLOCK)
    return {"TIDINGS_TOKEN": issuer.issue("alice", claims=TokenClaims(**claims))}


def test_a_token_needs_the_right_and_a_workspace_must_be_there(node: tuple[Process, Path], tmp_path: Path) -> None:
    """Through a node a token without the administrator's right is refused the capability; reading takes the right to read."""
    at = ("-w", node[1])
    assert ok("subject", "list", *at, env=token(topics=frozenset({"ledger"}))) == []
    merge = ("subject", "merge", "a", "b", "--yes", *at)
    refused = refusal(*merge, env=token(topics=frozenset({"ledger"})))
    assert "permission_denied/ledger_admin_not_granted" in refused["message"]
    refused = refusal("subject", "list", *at, env=token(topics=frozenset({"other"})))
    assert "permission_denied/forbidden" in refused["message"]
    refused = refusal(*merge, env=token(roles=frozenset({"admin"})))
    assert "merge_source_unknown" in refused["message"]
    missing = invoke("subject", "list", "-w", tmp_path / "nowhere")
    assert missing.exit_code == 3


def test_the_ledger_is_changed_and_looked_at_through_the_node_and_then_without_it(
    node: tuple[Process, Path],
) -> None:
    """Through the steward socket the kernel says who asks; without a node the tool opens the workspace. Privileged verbs are on record."""
    process, workspace = node
    at = ("-w", workspace)
    first = ok("subject", "announce", "track", "id:1", "--plugin", PLUGIN, *at)["canonical_id"]
    ok("subject", "announce", "track", "id:2, and on", "--plugin", PLUGIN, "--state", '{"length": 3}', *at)
    ok("subject", "announce", "album", "id:9", "--plugin", PLUGIN, *at)
    ok("relation", "claim", "id:1", "album_of", "id:9", "--plugin", PLUGIN, *at)
    assert {each["subject_type"] for each in ok("subject", "list", *at)} == {"track", "album"}
    [shown] = ok("subject", "show", "id:1", "--predicate", "album_of", *at)["related"]
    assert shown["predicate"] == "album_of"
    assert "id:2, and on" in invoke("subject", "list", "--type", "track", *at).stdout

    assert ok("subject", "merge", "id:1", "id:2, and on", "--dry-run", *at) == {"would": "merge id:1 and id:2, and on"}
    refused = invoke("subject", "merge", "id:1", "id:9", "--dry-run", *at)
    assert refused.exit_code != 0
    assert "type" in refused.stderr
    merged = ok("subject", "merge", "id:1", "id:2, and on", "--reason", "the same", "--yes", *at)["result"]["new_id"]
    assert ok("subject", "show", first, *at)["aliased_from"]["terminal_id"] == merged
    assert "retired" in invoke("subject", "show", first, *at).stdout
    hidden = ok("relation", "suppress", "id:1", "album_of", "id:9", "--reason", "dispute", "--yes", *at)
    assert hidden["result"] == {"outcome": "newly_suppressed"}
    assert ok("relation", "list", *at)["suppressed"] is True
    again = ("relation", "suppress", "id:1", "album_of", "id:9", "--reason", "dispute", "--dry-run")
    assert invoke(*again, *at).stdout == "would change nothing (already_suppressed)\n"
    ok("relation", "unsuppress", "id:1", "album_of", "id:9", "--yes", *at)
    split = ok("subject", "split", merged, "--group", "id:1", "--group", '["id:2, and on"]', "--yes", *at)["result"][
        "new_ids"
    ]
    assert len(split) == 2
    entries = ok("subject", "admin-log", *at)
    assert [each["kind"] for each in entries] == [
        "subject_merge",
        "relation_suppress",
        "relation_unsuppress",
        "subject_split",
    ]
    assert {each["admin_plugin"] for each in entries} == {f"uid:{os.getuid()}"}
    assert re.search(r"\b20\d\d-\d\d-\d\dT\d\d:\d\d:\d\dZ ", invoke("subject", "admin-log", *at).stdout)

    told = ok("happenings", "tail", "--since", 0, "--variant", "subject_merged", "--count", 1, *at)
    assert told["happening"]["new_id"] == merged
    assert (
        "subject_split"
        in invoke("happenings", "tail", "--since", 0, "--variant", "subject_split", "--count", 1, *at).stdout
    )

    spec = '{"appointment_id": "a", "time": "06:30", "zone": {"kind": "utc"}, "recurrence": {"kind": "daily"}}'
    assert ok("appointment", "create", "me", "--spec", spec, "--action", ACTION, *at)["appointment_created"]
    assert ok("appointment", "list", *at)["spec"]["appointment_id"] == "a"
    appointments = invoke("appointment", "list", "--limit", "1", *at).stdout
    assert "daily 06:30" in appointments
    assert "T06:30:00Z" in appointments
    watch = '{"watch_id": "w", "condition": {"kind": "happening_match", "filter": {"variants": ["custody_taken"]}}}'
    assert ok("watch", "create", "me", "--spec", watch, "--action", ACTION, *at)["watch_created"]
    assert ok("watch", "show", "me", "w", *at)["state"] == "pending"
    assert ok("custody", "list", *at) == []
    assert ok("grammar", "list", *at) == []

    process.process.send_signal(signal.SIGTERM)
    assert process.exit_code() == 0
    assert ok("appointment", "show", "me", "a", *at)["state"] == "pending"
    assert ok("appointment", "cancel", "me", "a", "--dry-run", *at) == {"would": "cancel the appointment me/a"}
    assert invoke("watch", "cancel", "me", "none", "--dry-run", *at).stdout == "would change nothing\n"
    assert ok("appointment", "cancel", "me", "a", "--yes", *at)["cancelled"] is True
    assert invoke("watch", "cancel", "me", "none", "--yes", *at).stdout == "there was nothing to cancel\n"
    ok("subject", "force-retract", "id:2, and on", "--of", PLUGIN, "--as", "curator", "--yes", *at)
    assert [each["admin_plugin"] for each in ok("subject", "admin-log", *at)][-2:] == [
        f"cli:uid-{os.getuid()}",
        "curator",
    ]
    assert ok("subject", "list", "--type", "track", *at)["canonical_id"] == split[0]


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (("subject", "show", "id:nobody"), "no subject has the addressing"),
        (("subject", "announce", "track", "nocolon", "--plugin", PLUGIN), "no addressing"),
        (("appointment", "create", "me", "--spec", "{", "--action", "{}"), "--spec is no JSON"),
        (("grammar", "migrate", "t", "--yes"), "say which type they get"),
        (("subject", "merge", "a", "b"), "no terminal to ask on"),
    ],
)
def test_what_makes_no_sense_is_refused_before_anything_is_done(
    tmp_path: Path, args: tuple[str, ...], problem: str
) -> None:
    """A misspelt name, text that is no JSON, an option too few: a sentence and exit code 2."""
    asyncio.run(made(tmp_path))
    result = invoke(*args, "-w", tmp_path)
    assert (result.exit_code, problem in result.stderr) == (2, True), result.stderr


async def made(workspace: Path) -> None:
    """An empty log."""
    await (await open_log(workspace, SMALL_SEGMENTS)).close()


def test_a_catalogue_can_be_used_before_there_is_a_log(tmp_path: Path) -> None:
    """In a new folder the tool makes the log, and the catalogue is in use from then on; nothing else makes one."""
    (tmp_path / "catalogue.toml").write_text(CATALOGUE)
    assert invoke("grammar", "list", "-w", tmp_path / "new").exit_code == 3
    ok("grammar", "use", tmp_path / "catalogue.toml", "-w", tmp_path / "new")
    announced = ok("subject", "announce", "track", "id:1", "--plugin", PLUGIN, "-w", tmp_path / "new")

    assert announced["announced"] == "created"
