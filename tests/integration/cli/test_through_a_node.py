"""Every verb that changes something does the same in the files of a workspace and through a node: same output, same exit code."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import stat
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any, Final

import pytest
import typer.main

from tests.integration.cli.support import SMALL_SEGMENTS, environment, fill, invoke, started
from tidings.bus import EventBus
from tidings.cli.reference import commands
from tidings.cli.root import app
from tidings.cli.session import OF_FILES
from tidings.testing.node import RunningNode, running_node

GROUP: Final = ("demo", "worker")
NOTED: Final = ("--type", "NOTED", "--space", "shared:home")
LINES: Final = '{"n": 1}\n{"meta": {"topic": "demo", "type": "NOTED", "space_id": "s", "event_id": "demo-3"}, "payload": {"n": 3}}\n[]\n{"n": 2}\n'
"""New, a conflict, no payload, new."""

POLICY: Final = Path(__file__).with_name("shut.cedar")

VERBS: Final[tuple[tuple[str, ...], ...]] = (
    ("topic", "list"),
    ("topic", "show", "old"),
    ("log", "retention", "--max-bytes", "old=1KB"),
    ("log", "retention", "--max-bytes", "old=1KB", "--yes"),
    ("log", "retention", "--max-age-days", "0", "--yes"),
    ("log", "retention"),
    ("log", "append", "demo", *NOTED, "--id", "own", "--payload", '{"n": 1}'),
    ("log", "append", "demo", *NOTED, "--id", "own", "--payload", '{"n": 1}'),  # once more: a duplicate
    ("log", "append", "demo", *NOTED, "--id", "own", "--payload", '{"n": 2}'),  # a conflict
    ("log", "append", "de mo", *NOTED, "--payload", "{}"),
    ("log", "append", "demo", "-", *NOTED),
    ("log", "read", "old", "--last", "3"),
    ("log", "read", "--since", "3", "--until", "20"),
    ("log", "read", "demo", "--from-offset", "2", "--limit", "2", "--raw"),
    ("log", "read", "demo", "--to-time", "2000-01-01"),
    ("log", "export", "--until", "72"),
    ("log", "export", "--topic", "demo", "--format", "events", "--since", "70", "--until", "72"),
    ("log", "export", "--topic", "none"),
    ("topic", "show", "none"),
    ("grant", "ana", "read", "topic:demo", "--dry-run"),
    ("policy", "put", "shut", str(POLICY), "--dry-run"),
    ("grant", "--list"),
    ("policy", "list"),
    ("policy", "explain", "read", "topic:demo", "--subject", "ana"),
    ("gateway", "audit"),
    ("group", "list"),
    ("group", "list", "--topic", "demo"),
    ("group", "show", *GROUP),
    ("group", "show", "demo", "nobody"),
    ("group", "pause", *GROUP, "--dry-run"),
    ("group", "pause", *GROUP),
    ("group", "pause", *GROUP),
    ("group", "pause", "demo", "nobody"),
    ("group", "resume", *GROUP),
    ("group", "seek", *GROUP, "--to-offset", "3", "--dry-run"),
    ("group", "seek", *GROUP, "--to-offset", "3", "--yes"),
    ("group", "seek", *GROUP, "--to-offset", "999", "--yes"),
    ("group", "seek", *GROUP, "--earliest"),  # nobody to ask
    ("group", "seek", *GROUP, "--to-time", "2000-01-01", "--yes"),
    ("group", "seek", *GROUP, "--latest", "--yes"),
    ("group", "delete", *GROUP, "--dry-run"),
    ("group", "delete", *GROUP, "--yes"),
    ("group", "delete", *GROUP, "--yes"),
    ("dlq", "list"),
    ("dlq", "list", "demo", "--error-type", "ValueError"),
    ("dlq", "show", "demo", "failing-0"),
    ("dlq", "show", "demo", "failing-99"),
    ("dlq", "redrive", "demo"),  # nothing says which
    ("dlq", "redrive", "demo", "failing-0", "--dry-run"),
    ("dlq", "redrive", "demo", "failing-0", "failing-1", "--yes"),
    ("dlq", "redrive", "demo", "failing-99", "--yes"),
    ("dlq", "drop", "demo", "--group", "failing", "--yes"),
    ("dlq", "drop", "demo", "--group", "failing", "--yes"),  # nothing is left
)

# What is another one each time, or says who runs a group.
_VARYING: Final = (
    (re.compile(r"\bid [0-9A-Za-z-]{20,}"), "id ID"),
    (re.compile(r'"event_id":"(?!own|demo-|old-)[^"]+"'), '"event_id":"ID"'),
    (re.compile(r'"(audit_seq|seq)":\d+'), r'"\1":N'),
    (re.compile(r"\bseq \d+"), "seq N"),
    (re.compile(r'"oldest_unacked_age_s":[\d.]+'), '"oldest_unacked_age_s":T'),
    (re.compile(r"\b\d+(\.\d)? (s|min)\b"), "AGE"),
    (re.compile(r"\b(ready|idle)\b"), "STATE"),
    (re.compile(r" +"), " "),
    (re.compile(r"[─━]+"), "-"),
)


def plain(text: str) -> str:
    for pattern, instead in _VARYING:
        text = pattern.sub(instead, text)
    return text


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A workspace with a group that has handled some, one that failed on some, and a topic of many segments."""
    workspace = tmp_path_factory.mktemp("made") / "w"
    fill(workspace, ("old", 60), ("demo", 12))

    async def work() -> None:
        async def fail(event: dict[str, Any]) -> None:
            raise ValueError("no good")

        async def handle(event: dict[str, Any]) -> None:
            pass

        async with EventBus(workspace, log_settings=SMALL_SEGMENTS) as bus:
            await bus.subscribe("demo", "failing", fail, max_retries=0)
            await bus.subscribe("demo", "worker", handle)
            await bus.drain()

    asyncio.run(work())
    return workspace


@pytest.fixture
async def node(made: Path, tmp_path: Path) -> AsyncIterator[RunningNode]:
    """A node on a copy of it."""
    shutil.copytree(made, tmp_path / "served")
    async with running_node(tmp_path / "served") as node:
        yield node


async def ran(*words: object, env: dict[str, str] | None = None) -> tuple[int, str, str]:
    """How a command line ends, in a thread, while this one goes on serving."""
    result = await asyncio.to_thread(invoke, *words, stdin=LINES, env=env)
    return int(result.exit_code), plain(result.stdout), plain(result.stderr)


@pytest.mark.parametrize(
    "form", [pytest.param((), id="text", marks=pytest.mark.heavy), pytest.param(("--json",), id="json")]
)
async def test_each_verb_does_the_same_in_files_and_through_a_node(
    made: Path, node: RunningNode, tmp_path: Path, form: tuple[str, ...]
) -> None:
    """One after another, on two copies of a workspace: the answer, the errors and the exit code are the same."""
    shutil.copytree(made, tmp_path / "files")
    token = node.token("root", roles=["admin"])

    files = [await ran(*words, *form, "-w", tmp_path / "files") for words in VERBS]
    through = [await ran(*words, *form, "--node", node.url, "--token", token) for words in VERBS]

    differing = [each for each in zip(VERBS, files, through, strict=True) if each[1] != each[2]]
    assert differing == [], differing


async def test_the_node_that_holds_the_workspace_is_found(node: RunningNode) -> None:
    """What changes something goes to it, with the token at hand; what its file lacks is on record by the node."""
    workspace = node.workspace
    env = {"TIDINGS_TOKEN": node.token("root", roles=["admin"])}

    code, said, _ = await ran("log", "append", "demo", *NOTED, "--payload", "{}", "--json", "-w", workspace, env=env)
    assert (code, json.loads(said.replace(":N", ":0"))["offset"]) == (0, 12)
    dropped = await ran("log", "retention", "--max-bytes", "old=1KB", "--yes", "--json", "-w", workspace, env=env)
    assert (dropped[0], node.log.topics()["old"].first_offset > 0) == (0, True)

    bare = await ran("log", "append", "demo", *NOTED, "--payload", "{}", "-w", workspace)
    assert (bare[0], "TIDINGS_TOKEN" in bare[2]) == (2, True)


async def test_new_records_are_followed_through_a_node(node: RunningNode) -> None:
    """``log tail --node`` begins with the last ones and shows each further one, until Ctrl-C."""
    env = {**environment(), "TIDINGS_TOKEN": node.token("root", roles=["admin"])}
    with started("log", "tail", "demo", "--last", "2", "--json", "--node", node.url, env=env) as process:
        before = [(await asyncio.to_thread(process.json))["offset"] for _ in range(2)]
        await node.bus.publish("demo", {"n": "new"}, type="NOTED", space="shared:home")
        after = await asyncio.to_thread(process.json)
        process.process.send_signal(signal.SIGINT)
        assert await asyncio.to_thread(process.exit_code) == 0

    assert (before, after["offset"], after["payload"]) == ([10, 11], 12, {"n": "new"})


async def test_what_only_files_can_say_is_refused_of_a_node(node: RunningNode, tmp_path: Path) -> None:
    """Keys and a lake are the node's own; a command of the files says that it needs them."""
    asked = ("--node", node.url, "--token", node.token("root", roles=["admin"]))
    (tmp_path / "keys.json").write_text("{}")

    sealed = await ran("log", "append", "demo", *NOTED, "--payload", "{}", "--key-file", tmp_path / "keys.json", *asked)
    lake = await ran("log", "retention", "--max-bytes", "1KB", "--yes", "--lake", tmp_path, *asked)
    verified = await ran("log", "verify", *asked)

    assert [each[0] for each in (sealed, lake, verified)] == [2, 2, 2]
    assert "its own keys" in sealed[2]
    assert "a lake of its own" in lake[2]
    assert "it asks no node: if it works on a workspace's files, name that with -w DIR" in verified[2]


async def test_stats_through_a_node_are_those_of_the_log(made: Path, node: RunningNode) -> None:
    """The numbers are those of the files, and its files' own (index, journal, writer) are left out."""
    token = node.token("root", roles=["admin"])
    files = json.loads((await ran("log", "stats", "--json", "-w", made))[1])
    through = json.loads((await ran("log", "stats", "--json", "--node", node.url, "--token", token))[1])
    shown = await ran("log", "stats", "--node", node.url, "--token", token)

    assert through == {"node": node.url, **{name: files[name] for name in through if name != "node"}}
    assert (through["records"], shown[0], f"Log at {node.url}" in shown[1]) == (72, 0, True)


async def test_a_refused_token_is_named_by_where_it_came_from(node: RunningNode, tmp_path: Path) -> None:
    """The hint says whether it was that of the environment, of --token or of the context, and what is shown without it."""
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    (tmp_path / "token.txt").write_text(node.token("root", roles=["admin"]))
    await ran("context", "add", "shop", node.url, "--token-file", tmp_path / "token.txt", env=env)

    old = await ran("topic", "list", "--node", "shop", env={**env, "TIDINGS_TOKEN": "a.b.c"})
    given = await ran("topic", "list", "--node", node.url, "--token", "a.b.c", env=env)

    assert (old[0], "was shown is TIDINGS_TOKEN; the context shop's own is shown without it" in old[2]) == (1, True)
    assert (given[0], "was shown is that of --token\n" in given[2]) == (1, True)


FILES_ONLY: Final = {
    *("bench", "demo", "doctor", "serve", "key shred", "log repair", "log verify", "policy dismiss", "token issue"),
    *(
        "pipeline backfill",
        "pipeline explain",
        "pipeline export",
        "pipeline prepare",
        "pipeline repair",
        "pipeline report",
    ),
    *(
        "pipeline run",
        "pipeline scrub",
        "pipeline status",
        "pipeline verify",
        "table list",
        "table query",
        "table show",
    ),
}
"""Commands that work on files or on this machine: the lake, keys and secrets, checks and repairs byte by byte, the node itself."""
NEITHER: Final = {
    *("context add", "context list", "context remove", "context use", "errors"),
    *("key add", "key create", "policy check", "token show"),
}
"""Commands that are about neither a workspace nor a node."""


def test_every_command_asks_a_node_or_says_that_it_works_on_files() -> None:
    """Each command of the tool can be told a node, but for those that have none to ask; the help of those with a workspace says so."""
    kinds: dict[str, set[str]] = {"node": set(), "files": set(), "neither": set()}
    for path, command in commands(typer.main.get_command(app), "tidings"):
        options = {name for param in command.params for name in param.opts}
        kind = "node" if "--node" in options else "files" if "--workspace" in options else "neither"
        kinds[kind].add(path.removeprefix("tidings "))
        assert (OF_FILES in (command.help or "")) == (kind == "files"), path

    assert kinds["files"] == FILES_ONLY
    assert kinds["neither"] == NEITHER
    assert len(kinds["node"]) > 60


async def test_what_is_no_node_is_said(tmp_path: Path) -> None:
    """An address that is none, and one where nobody answers, end the command with a sentence."""
    wrong = await ran("group", "list", "--node", "ftp://nowhere")
    silent = await ran("group", "list", "--node", "http://127.0.0.1:9", "--token", "t")

    assert (wrong[0], "not the address of a node" in wrong[2]) == (2, True)
    assert (silent[0], "did not answer" in silent[2], "see that it runs" in silent[2]) == (1, True, True)


async def test_an_address_with_a_password_is_refused_and_not_repeated(tmp_path: Path) -> None:
    """Neither ``--node`` nor a context takes one: addresses are kept and printed."""
    env = {"XDG_CONFIG_HOME": str(tmp_path)}
    for words in (("group", "list", "--node"), ("context", "add", "shop")):
        done = await ran(*words, "http://ana:hush@127.0.0.1:9", env=env)
        assert (done[0], "no user, password" in done[2], "hush" in done[1] + done[2]) == (2, True, False)


async def test_a_token_that_is_refused_says_where_it_came_from(node: RunningNode) -> None:
    """One left over in TIDINGS_TOKEN is the usual cause, so the hint names that."""
    done = await ran("group", "list", "--node", node.url, env={"TIDINGS_TOKEN": "old"})
    assert (done[0], "not valid" in done[2], "TIDINGS_TOKEN" in done[2]) == (1, True, True)


async def test_a_context_in_use_says_so_where_there_is_a_workspace(
    node: RunningNode, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a folder with a workspace of its own, a line on stderr says that the context's node is asked; none with ``--json``."""
    (tmp_path / "workspace").mkdir()
    monkeypatch.chdir(tmp_path)
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config"), "TIDINGS_TOKEN": node.token("root", roles=["admin"])}
    await ran("context", "add", "shop", node.url, "--use", env=env)

    told, quiet = await ran("group", "list", env=env), await ran("group", "list", "--json", env=env)
    of_files = await ran("log", "verify", env=env)

    assert of_files[2].startswith("in the files of workspace, whatever context is in use; -w DIR names other files\n")
    assert (told[0], told[2]) == (0, f"at {node.url}, the context in use; for the folder here: -w workspace\n")
    assert (quiet[0], quiet[2]) == (0, "")


async def test_a_context_names_a_node_and_its_token(node: RunningNode, tmp_path: Path) -> None:
    """Named or in use, its node is asked with its token, which stands in a private file and is never shown; a workspace goes before it."""
    env = {"XDG_CONFIG_HOME": str(tmp_path / "config")}
    token = node.token("root", roles=["admin"])
    (tmp_path / "token.txt").write_text(token + "\n")
    shown: list[str] = []

    async def do(*words: object) -> tuple[int, str, str]:
        done = await ran(*words, env=env)
        shown.append(done[1] + done[2])
        return done

    assert (await do("context", "list"))[1].startswith("there are no contexts")
    unknown = await do("group", "list", "--node", "shop")
    assert (unknown[0], "there is no context 'shop'" in unknown[2]) == (2, True)
    assert (await do("context", "add", "shop", node.url, "--token-file", tmp_path / "token.txt"))[0] == 0
    assert "worker" in (await do("group", "list", "--node", "shop"))[1]
    await do("context", "add", "other", "http://127.0.0.1:9", "--use")
    gone = await do("group", "list")
    assert (gone[0], "the context in use names it" in gone[2]) == (1, True)
    await do("context", "use", "shop")
    assert (await do("group", "pause", *GROUP))[0] == 0
    assert (await do("group", "list", "-w", tmp_path / "none"))[0] == 3
    assert "shop" in (await do("context", "list"))[1]
    kept = tmp_path / "config" / "tidings" / "contexts.json"
    assert stat.S_IMODE(kept.stat().st_mode) == 0o600

    await do("context", "remove", "shop")
    assert (await do("context", "use", "shop"))[0] == 2
    assert token not in kept.read_text() + "".join(shown)
    assert (await do("context", "add", "a/b", node.url))[0] == 2
    kept.write_text("{")
    assert (await do("context", "list"))[0] == 3
