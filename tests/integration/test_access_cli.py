"""Access from the command line: on the log itself, and through a node that holds it."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx
import jwt
import pytest
from cryptography.hazmat.primitives.asymmetric import ed25519

from tests.integration.cli.support import fill, invoke, lines
from tests.integration.test_node_http import certificate
from tidings.core.events import Event, EventMeta
from tidings.log import LogSettings
from tidings.log.embedded import open_log
from tidings.log.embedded.layout import Layout
from tidings.log.interface import Query
from tidings.log.reading import records as log_records
from tidings.server.address import NodeAddress, publish_address
from tidings.testing.node import running_node
from tidings.types import ReceivedEvent

SECRET: Final = "0123456789abcdef0123456789abcdef"
WITH_SECRET: Final = {"TIDINGS_JWT_SECRET": SECRET, "TIDINGS_TOKEN": ""}
EDITORS: Final = 'permit (principal in Role::"editor", action == Action::"publish", resource == Topic::"news");\n'


@pytest.fixture
def workspace(tmp_path: Path) -> Path:
    fill(tmp_path / "w", ("demo", 1))
    return tmp_path / "w"


@pytest.fixture
def editors(tmp_path: Path) -> Path:
    path = tmp_path / "editors.cedar"
    path.write_text(EDITORS)
    return path


def done(*args: object, stdin: str = "") -> dict[str, Any]:
    """What a command that goes well answers in JSON."""
    result = invoke(*args, "--json", stdin=stdin, env=WITH_SECRET)
    assert result.exit_code == 0, result.stderr
    found: dict[str, Any] = json.loads(result.stdout)
    return found


def may(workspace: Path, *args: object) -> bool:
    """Whether the explanation says yes; exit code and answer agree."""
    result = invoke("policy", "explain", *args, "--json", "-w", workspace)
    answer: bool = json.loads(result.stdout)["is_allowed"]
    assert result.exit_code == (0 if answer else 1)
    return answer


def records(workspace: Path, topic: str) -> list[dict[str, Any]]:
    result = invoke("log", "read", topic, "--json", "-w", workspace)
    if result.exit_code != 0:
        assert json.loads(result.stderr)["error"]["code"] == "log.unknown_topic"
        return []
    return lines(result.stdout)


# Grants


def test_a_grant_and_its_revocation_are_records(workspace: Path) -> None:
    """Each change is an access record and leaves an audit record before it; the explanation follows them."""
    asked = ("sync", "partition:home-1", "--subject", "alice")
    assert not may(workspace, *asked)

    granted = done("grant", "alice", "sync", "partition:home-*", "--reason", "asked for", "-w", workspace)
    assert may(workspace, *asked)
    revoked = done("revoke", "alice", "sync", "partition:home-1", "-w", workspace)
    assert not may(workspace, *asked)
    assert may(workspace, "sync", "partition:home-2", "--subject", "alice")

    kept = records(workspace, "access")
    assert [(each["seq"], each["meta"]["type"]) for each in kept] == [
        (granted["seq"], "access.grant"),
        (revoked["seq"], "access.revoke"),
    ]
    assert kept[0]["payload"]["reason"] == "asked for"
    assert kept[0]["meta"]["actor"].startswith("cli:uid-")
    assert [(each["seq"], each["meta"]["type"]) for each in records(workspace, "audit")[::2]] == [
        (granted["audit_seq"], "cli.access.grant"),
        (revoked["audit_seq"], "cli.access.revoke"),
    ]
    assert [each["payload"] for each in records(workspace, "audit")[1::2]] == [
        {"outcome": "done", "audit_seq": granted["audit_seq"]},
        {"outcome": "done", "audit_seq": revoked["audit_seq"]},
    ]
    assert granted["audit_seq"] < granted["seq"]


def test_several_actions_are_several_records(workspace: Path) -> None:
    """Commas save typing, nothing else."""
    assert invoke("grant", "alice", "sync,submit", "partition:p", "-w", workspace).exit_code == 0

    assert [each["payload"]["action"] for each in records(workspace, "access")] == ["sync", "submit"]


def test_a_subject_and_a_token_can_be_revoked_as_a_whole(workspace: Path) -> None:
    """``--all`` takes everything until ``--restore``; ``--token-id`` takes one token."""
    done("grant", "alice", "read", "topic:demo", "-w", workspace)
    done("revoke", "alice", "--all", "-w", workspace)
    assert not may(workspace, "read", "topic:demo", "--subject", "alice")
    done("grant", "alice", "--restore", "-w", workspace)
    assert may(workspace, "read", "topic:demo", "--subject", "alice")

    issued = done("token", "issue", "alice")
    assert may(workspace, "read", "topic:demo", "--bearer", issued["token"])
    done("revoke", "--token-id", issued["token_id"], "-w", workspace)
    assert not may(workspace, "read", "topic:demo", "--bearer", issued["token"])


def test_what_is_in_force_is_listed(workspace: Path) -> None:
    """Grants, revocations, revoked subjects and tokens; all of them or one subject's."""
    assert "no grants" in invoke("grant", "--list", "-w", workspace).stdout
    done("grant", "alice", "read", "topic:demo", "-w", workspace)
    done("revoke", "bob", "read", "topic:*", "-w", workspace)
    done("revoke", "eve", "--all", "-w", workspace)
    done("revoke", "--token-id", "t1", "-w", workspace)

    everything = lines(invoke("grant", "--list", "--json", "-w", workspace).stdout)
    shown = invoke("grant", "--list", "-w", workspace).stdout

    assert [(each["subject"], each["resource"], each["state"]) for each in everything[:-1]] == [
        ("alice", "topic:demo", "granted"),
        ("bob", "topic:*", "revoked"),
        ("eve", "*", "revoked"),
    ]
    assert everything[-1] == {"token_id": "t1", "state": "revoked"}
    assert all(word in shown for word in ("alice", "topic:*", "eve", "t1"))
    assert [each["subject"] for each in lines(invoke("grant", "--list", "bob", "--json", "-w", workspace).stdout)] == [
        "bob"
    ]


def test_a_dry_run_changes_nothing(workspace: Path, editors: Path) -> None:
    """Every changing verb checks and tells, and leaves the log as it was."""
    done("policy", "put", "editors", editors, "-w", workspace)
    before = records(workspace, "access") + records(workspace, "audit")

    for words in (
        ("grant", "alice", "read", "topic:demo"),
        ("revoke", "alice", "--all"),
        ("policy", "put", "more", editors),
        ("policy", "remove", "editors"),
    ):
        assert done(*words, "--dry-run", "-w", workspace)["carried_out"] is False
    assert records(workspace, "access") + records(workspace, "audit") == before


@pytest.mark.parametrize(
    "words",
    [
        ("grant",),
        ("grant", "alice"),
        ("grant", "alice", "read"),
        ("grant", "alice", "fly", "topic:demo"),
        ("grant", "alice", "read,", "topic:demo"),
        ("grant", "alice", "read", "demo"),
        ("grant", "alice", "read", "planet:x"),
        ("grant", "alice", "read", "topic:a/b"),
        ("grant", "", "read", "topic:demo"),
        ("grant", "alice", "read", "--list"),
        ("grant", "alice", "read", "topic:demo", "--restore"),
        ("revoke", "alice"),
        ("revoke", "alice", "--token-id", "t"),
        ("revoke", "alice", "read", "topic:demo", "--all"),
        ("policy", "explain", "read", "topic:demo"),
        ("policy", "explain", "fly", "topic:demo", "--subject", "a"),
        ("policy", "explain", "read", "demo", "--subject", "a"),
        ("policy", "remove", "x", "--dry-run", "--yes"),
        ("policy", "remove", "x"),
        ("token", "issue", "alice"),
        ("token", "issue", "alice", "--secret", SECRET, "--expires-in", "soon"),
        ("token", "issue", "alice", "--secret", SECRET, "--expires-in", "0s"),
        ("token", "issue", "alice", "--secret", "short"),
        ("token", "issue", "alice", "--secret", SECRET, "--partition-prefix", ""),
    ],
)
def test_what_makes_no_sense_is_refused(workspace: Path, words: tuple[str, ...]) -> None:
    """Exit code 2, a sentence, and nothing in the log."""
    result = invoke(*words, "-w", workspace)

    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("error: ")
    assert records(workspace, "access") == []


# Policies


def test_a_policy_comes_and_goes(workspace: Path, editors: Path) -> None:
    """Checked, put, explained, listed and removed."""
    asked = ("publish", "topic:news", "--subject", "eve", "--role", "editor")
    assert done("policy", "check", editors) == {"is_valid": True, "statements": 1}
    done("policy", "put", "editors", editors, "-w", workspace)
    assert may(workspace, *asked)
    (listed,) = lines(invoke("policy", "list", "--json", "-w", workspace).stdout)
    assert (listed["name"], listed["text"], listed["problem"]) == ("editors", EDITORS, None)
    assert "editors" in invoke("policy", "list", "-w", workspace).stdout

    done("policy", "remove", "editors", "--yes", "-w", workspace)

    assert not may(workspace, *asked)
    assert "built-in" in invoke("policy", "list", "-w", workspace).stdout


def test_an_explanation_is_for_people_too(workspace: Path, editors: Path) -> None:
    """The policy that settles it is named."""
    done("policy", "put", "editors", editors, "-w", workspace)

    yes = invoke("policy", "explain", "publish", "topic:news", "--subject", "eve", "--role", "editor", "-w", workspace)
    no = invoke("policy", "explain", "publish", "topic:news", "--subject", "eve", "-w", workspace)

    assert (yes.exit_code, "eve may publish topic:news" in yes.stdout, "editors#1" in yes.stdout) == (0, True, True)
    assert (no.exit_code, "may not" in no.stdout, "no policy permits it" in no.stdout) == (1, True, True)


@pytest.mark.parametrize(
    "text",
    [
        "permit (principal",
        'permit (principal, action == Action::"fly", resource);',
        "",
        'forbid (principal == Subject::"e\u0301ve", action, resource);',
        'forbid (principal, action, resource == Object::"order:vault");',
    ],
)
def test_a_bad_policy_is_not_stored(workspace: Path, text: str) -> None:
    """Checking and putting refuse it alike, with the reason."""
    for words in (("policy", "check", "-"), ("policy", "put", "bad", "-", "-w", workspace)):
        result = invoke(*words, "--json", stdin=text)
        assert result.exit_code == 1
        assert json.loads(result.stderr)["error"]["code"] == "access.invalid_policy"
    assert records(workspace, "access") == []


def test_removing_what_is_not_there_is_refused(workspace: Path) -> None:
    """Exit code 1, and nothing in the log."""
    result = invoke("policy", "remove", "nothing", "--yes", "-w", workspace)

    assert (result.exit_code, "there is no policy 'nothing'" in result.stderr) == (1, True)


def test_a_record_that_cannot_be_read_is_shown_and_dismissed(workspace: Path) -> None:
    """Everything is denied because of it, ``policy list`` says so, and dismissing it opens the book again."""
    done("grant", "alice", "read", "topic:demo", "-w", workspace)
    strange = done(
        "log", "append", "access", "--type", "access.revoke", "--space", "s", "--payload", "{}", "-w", workspace
    )
    assert not may(workspace, "read", "topic:demo", "--subject", "alice")
    listed = invoke("policy", "list", "-w", workspace)
    assert (listed.exit_code, f"seq {strange['seq']}" in listed.stderr) == (1, True)

    assert invoke("policy", "dismiss", 1, "-w", workspace).exit_code == 1
    done("policy", "dismiss", strange["seq"], "--reason", "a test", "-w", workspace)

    assert may(workspace, "read", "topic:demo", "--subject", "alice")
    assert invoke("policy", "list", "-w", workspace).exit_code == 0


# Tokens


def test_a_token_is_issued_and_shown(tmp_path: Path) -> None:
    """On stdout stands the token alone, so that a shell can take it; with the secret it is believed."""
    result = invoke(
        *("token", "issue", "alice", "--client-id", "phone", "--user-id", "u1", "--partition", "p"),
        *("--partition-prefix", "home-"),
        *("--project", "x", "--topic", "t", "--topic-prefix", "a.", "--space", "s", "--space-prefix", "b:"),
        *("--role", "editor", "--role", "admin", "--read-only", "--expires-in", "2h"),
        env=WITH_SECRET,
    )
    token = result.stdout.strip()

    shown = done("token", "show", token)

    payload = shown["payload"]
    assert shown["is_believed"] is True
    assert payload["exp"] - payload["iat"] == 7200
    assert {name: value for name, value in payload.items() if name not in ("exp", "iat", "jti")} == {
        "sub": "alice",
        "client_id": "phone",
        "user_id": "u1",
        "allowed_partitions": ["p"],
        "allowed_partition_prefixes": ["home-"],
        "projectIds": ["x"],
        "topics": ["t"],
        "topic_prefixes": ["a."],
        "spaces": ["s"],
        "space_prefixes": ["b:"],
        "roles": ["admin", "editor"],
        "read_only": True,
    }
    assert f"id {payload['jti']}" in result.stderr


def test_the_secret_is_found_where_the_node_has_it(tmp_path: Path) -> None:
    """``TIDINGS_JWT_SECRET_FILE`` counts as it does for the node, and the secret of a node to try things with is found in its workspace."""
    (tmp_path / "secret.txt").write_text(SECRET + "\n")
    layout = Layout(tmp_path / "w")
    layout.dev.mkdir(parents=True)
    (layout.dev / "secret").write_text(SECRET + "\n")
    publish_address(tmp_path / "w", NodeAddress(url="http://127.0.0.1:9", pid=1, is_dev=True))

    by_file = invoke("token", "issue", "alice", env={"TIDINGS_JWT_SECRET_FILE": str(tmp_path / "secret.txt")})
    of_node = invoke("token", "issue", "alice", "-w", tmp_path / "w")

    for issued in (by_file, of_node):
        assert done("token", "show", issued.stdout.strip())["is_believed"] is True
    assert invoke("token", "issue", "alice", "-w", tmp_path / "other").exit_code == 2


def test_a_token_of_another_secret_is_not_believed(tmp_path: Path) -> None:
    """Shown all the same, with exit code 1; without a secret it is shown unchecked."""
    secret = tmp_path / "secret.txt"
    secret.write_text(SECRET[::-1] + "\n")
    token = done("token", "issue", "alice", "--secret-file", secret)["token"]

    wrong = invoke("token", "show", token, "--json", env=WITH_SECRET)
    unchecked = invoke("token", "show", "-", stdin=token + "\n")
    right = invoke("token", "show", token, "--secret-file", secret)

    assert (wrong.exit_code, json.loads(wrong.stdout)["is_believed"]) == (1, False)
    assert (unchecked.exit_code, "not checked" in unchecked.stdout) == (0, True)
    assert (right.exit_code, "believed" in right.stdout) == (0, True)
    assert invoke("token", "show", "nonsense").exit_code == 1


def test_a_token_can_be_signed_with_a_private_key(tmp_path: Path) -> None:
    """What the private key signs, the key set with its public one believes."""
    key = ed25519.Ed25519PrivateKey.generate()
    convert = jwt.algorithms.OKPAlgorithm.to_jwk
    (tmp_path / "key.json").write_text(json.dumps({**convert(key, as_dict=True), "kid": "k1"}))
    public = {**convert(key.public_key(), as_dict=True), "kid": "k1"}
    (tmp_path / "set.json").write_text(json.dumps({"keys": [public]}))
    parties = ("--audience", "tidings", "--issuer", "us")

    issued = invoke("token", "issue", "alice", "--signing-key", tmp_path / "key.json", *parties, "--json")
    token = json.loads(issued.stdout)["token"]

    assert invoke("token", "show", token, "--key-set", tmp_path / "set.json", *parties).exit_code == 0
    assert invoke("token", "show", token, "--key-set", tmp_path / "set.json").exit_code == 1
    (tmp_path / "bad.json").write_text("[]")
    assert invoke("token", "issue", "alice", "--signing-key", tmp_path / "bad.json").exit_code == 2
    assert invoke("token", "issue", "alice", "--signing-key", tmp_path / "none.json").exit_code == 3


# Through a node


class Ran(NamedTuple):
    """How a command line ended."""

    returncode: int
    stdout: bytes
    stderr: bytes


async def ran(*args: object) -> Ran:
    """Run a command line in a thread, while this one goes on serving."""
    result = await asyncio.to_thread(invoke, *args)
    return Ran(result.exit_code, result.stdout_bytes, result.stderr_bytes)


async def test_while_a_node_holds_the_workspace_changes_go_through_it(tmp_path: Path, editors: Path) -> None:
    """The same commands, with an administrator's token; what they change counts with the next request."""
    async with running_node(tmp_path / "w") as node, httpx.AsyncClient(base_url=node.url) as client:
        admin = ("--token", node.token("root", roles=["admin"]), "--json", "-w", tmp_path / "w")
        headers = node.headers("alice", topics=["news"])
        event = {"meta": {"topic": "news", "type": "NOTED", "space_id": "s"}, "payload": {}}

        async def status() -> int:
            return (await client.post("/v1/events", json=event, headers=headers)).status_code

        assert await status() < 300
        revoked = await ran("revoke", "alice", "publish", "topic:news", *admin)
        assert (revoked.returncode, revoked.stderr) == (0, b"")
        assert json.loads(revoked.stdout)["through"] == node.url
        assert await status() == 403
        granted = await ran("grant", "alice", "publish", "topic:news", *admin)
        assert granted.returncode == 0
        assert await status() < 300
        put = await ran("policy", "put", "editors", editors, *admin)
        assert (put.returncode, json.loads(put.stdout)["seq"] > json.loads(granted.stdout)["seq"]) == (0, True)
        question = ("policy", "explain", "publish", "topic:news", "--subject", "x", "--role", "editor", *admin[2:])
        async with asyncio.timeout(20):
            while (await ran(*question)).returncode != 0:  # it reads the files, which follow a moment later
                pass
        removed = await ran("policy", "remove", "editors", "--yes", *admin)
        assert removed.returncode == 0


async def test_groups_and_dead_letters_are_changed_through_the_node_that_runs_them(tmp_path: Path) -> None:
    """Pausing, moving, deleting, redriving and dropping act on the running bus, for whoever has the right, and are on record."""
    failing = True

    async def handle(received: ReceivedEvent) -> None:
        if failing:
            raise ValueError("no good")

    async with running_node(tmp_path / "w") as node:
        group = await node.bus.subscribe("demo", "g", handle, max_retries=0)
        await node.bus.unsubscribe(await node.bus.subscribe("demo", "old", handle))
        for _ in range(3):
            await node.bus.publish(Event(EventMeta("demo", "NOTED", "s"), {}))
        await node.bus.drain()
        own = ("--json", "-w", tmp_path / "w")
        admin = ("--token", node.token("root", roles=["admin"]), *own)

        assert (await ran("group", "pause", "demo", "g", *own)).returncode == 2  # no token
        lesser = await ran("group", "pause", "demo", "g", "--token", node.token("alice", topics=["demo"]), *own)
        assert (lesser.returncode, json.loads(lesser.stderr)["error"]["code"]) == (1, "access.forbidden")
        assert group.group_state is not None
        assert not group.group_state.is_paused
        paused = await ran("group", "pause", "demo", "g", *admin)
        assert (paused.returncode, json.loads(paused.stdout)["changes"]) == (0, True)
        assert group.group_state.is_paused
        assert (await ran("group", "resume", "demo", "g", *admin)).returncode == 0
        assert not group.group_state.is_paused

        dropped = await ran("dlq", "drop", "demo", "g-0", "--yes", *admin)
        assert (dropped.returncode, json.loads(dropped.stdout)["count"]) == (0, 1)
        failing = False
        redriven = await ran("dlq", "redrive", "demo", "--group", "g", "--yes", *admin)
        assert (redriven.returncode, json.loads(redriven.stdout)["count"]) == (0, 2)
        async with asyncio.timeout(20):
            while len(await node.bus.dead_letters("demo", states=("redriven",))) < 2:
                pass

        moved = await ran("group", "seek", "demo", "g", "--to-offset", 1, "--yes", *admin)
        assert (moved.returncode, json.loads(moved.stdout)["redelivered"]) == (0, 2)
        deleted = await ran("group", "delete", "demo", "old", "--yes", *admin)
        assert (deleted.returncode, await node.bus.groups("demo")) == (0, [("demo", "g")])
        verbs = [
            record.meta.type
            async for record in log_records(node.log, Query(topic="audit"))
            if not record.meta.type.endswith(".ended")
        ]

    assert verbs == [
        *(
            "api.group.pause",
            "api.group.resume",
            "api.dlq.drop",
            "api.dlq.redrive",
            "api.group.seek",
            "api.group.delete",
        )
    ]


async def test_a_node_with_tls_is_known_by_its_certificate(tmp_path: Path) -> None:
    """Whoever signed it, for whatever name: the node that shows the workspace's certificate gets the token, no other does."""
    cert, key = certificate(tmp_path)
    async with running_node(tmp_path / "w", tls_cert_file=cert, tls_key_file=key) as node:
        words = (
            "revoke",
            "alice",
            "--all",
            "--token",
            node.token("root", roles=["admin"]),
            "--json",
            "-w",
            tmp_path / "w",
        )
        done = await ran(*words)
        assert (done.returncode, done.stderr) == (0, b"")
        assert json.loads(done.stdout)["through"] == node.url
        seq = node.log.position.seq

        certificate(tmp_path)  # another one in its place, and the node was not told
        refused = await ran(*words)
        assert refused.returncode == 1
        assert b"another certificate" in refused.stderr
        assert node.log.position.seq == seq


async def test_a_node_refuses_who_is_no_administrator(tmp_path: Path) -> None:
    """Without a token the tool says what is missing; with a lesser one the node says no, and nothing changes."""
    async with running_node(tmp_path / "w") as node:
        words = ("grant", "alice", "read", "topic:demo", "--json", "-w", tmp_path / "w")

        bare = await ran(*words)
        lesser = await ran(*words, "--token", node.token("alice"))
        forged = await ran(*words, "--token", "x.y.z")
        unsendable = await ran(*words, "--token", "a\nb")

    assert (bare.returncode, b"TIDINGS_TOKEN" in bare.stderr) == (2, True)
    for refused, code in ((lesser, "access.forbidden"), (forged, "access.token_invalid")):
        assert (refused.returncode, json.loads(refused.stderr)["error"]["code"]) == (1, code)
    assert json.loads(unsendable.stderr)["error"]["code"] == "access.token_invalid"
    assert await asyncio.to_thread(records, tmp_path / "w", "access") == []


async def test_another_writer_keeps_changes_out(tmp_path: Path) -> None:
    """A writer that is no node, or a node that cannot be reached, is told apart and named."""
    log = await open_log(tmp_path / "w", LogSettings(journal_bytes=1 << 20))
    try:
        await log.append(Event(EventMeta("demo", "NOTED", "s"), {}))
        words = ("grant", "alice", "read", "topic:demo", "--token", "t", "--json", "-w", tmp_path / "w")
        busy = await ran(*words)
        (tmp_path / "w/.bus/node.json").write_text('{"url": "http://127.0.0.1:9", "pid": 1}')
        unreachable = await ran(*words)
    finally:
        await log.close()

    assert (busy.returncode, json.loads(busy.stderr)["error"]["code"]) == (4, "workspace.busy")
    assert (unreachable.returncode, json.loads(unreachable.stderr)["error"]["code"]) == (1, "access.node_unreachable")


async def test_revoking_a_subject_reports_its_delayed_events(tmp_path: Path) -> None:
    """``revoke --all`` through a node names how many events of the subject wait, as text and as JSON."""
    async with running_node(tmp_path / "w") as node, httpx.AsyncClient(base_url=node.url) as client:
        admin = ("--token", node.token("root", roles=["admin"]), "-w", tmp_path / "w")
        event = {"meta": {"topic": "news", "type": "NOTED", "space_id": "s"}, "payload": {}}
        for subject in ("alice", "alice", "bob"):
            headers = node.headers(subject, topics=["news"])
            assert (await client.post("/v1/events?delay_s=3600", json=event, headers=headers)).status_code == 201
        revoked = await ran("revoke", "alice", "--all", *admin, "--json")
        told = await ran("revoke", "bob", "--all", *admin)
        other = await ran("revoke", "carol", "--all", *admin)

    assert json.loads(revoked.stdout)["delayed_waiting"] == 2
    assert b"delayed events that wait, and will be refused when due: 1" in told.stdout
    assert b"delayed" not in other.stdout
