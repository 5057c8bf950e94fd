"""
Faults that outside audits found and that an open issue mends: each test states what has to hold, and is expected to fail until then.

``strict`` makes a test that begins to hold fail the run, so that the issue that mends it removes the mark.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider

from tests.integration.steward.support import SocketClient, stewarding
from tidings import Bus, Client, Nack
from tidings.bus.store.dead_letter_files import DeadLetterFiles
from tidings.client.ledger import LedgerClient
from tidings.core.events import Event, EventMeta
from tidings.testing.node import running_node

REPOSITORY = Path(__file__).parents[2]
SPACE = "shared:shop"


def left_to(issue: int, text: str) -> pytest.MarkDecorator:
    """Expect a failure until an issue has mended its cause."""
    return pytest.mark.xfail(strict=True, reason=f"issue {issue}: {text}")


OPERATIONS, PROCESSES, PAGES, PIPELINE = 30, 32, 33, 34

SECOND_PROCESS = """
import asyncio, sys
from tidings import Bus

async def main():
    async with Bus(sys.argv[1]) as bus:
        await bus.publish("orders", {}, type="PLACED", space="shared:shop")

asyncio.run(main())
"""

FORKED_CHILD = """
import asyncio, os, sys
from tidings import Bus
from tidings.core.errors import TidingsError

async def main():
    async with Bus(sys.argv[1]) as bus:
        await bus.publish("orders", {}, type="PLACED", space="shared:shop")
        child = os.fork()
        if child == 0:
            try:
                bus.publish("orders", {}, type="PLACED", space="shared:shop").send(None)
            except TidingsError:
                os._exit(0)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        return os.waitstatus_to_exitcode(status)

sys.exit(asyncio.run(main()))
"""


def run(program: str, workspace: Path) -> int:
    """Run a program on a workspace to its end. Return its exit code."""
    done = subprocess.run([sys.executable, "-c", program, str(workspace)], capture_output=True, timeout=60, check=False)
    return done.returncode


@left_to(PROCESSES, "a second process is refused instead of joining (first-hours 3)")
async def test_a_second_process_joins_the_workspace(tmp_path: Path) -> None:
    """A program that opens a workspace that another one holds publishes through its owner."""
    async with Bus(tmp_path / "w") as bus:
        await bus.publish("orders", {}, type="PLACED", space=SPACE)
        assert run(SECOND_PROCESS, tmp_path / "w") == 0


@left_to(PROCESSES, "a bus used in a forked child hangs (bus 8)")
def test_a_bus_in_a_forked_child_refuses_to_publish(tmp_path: Path) -> None:
    """Publishing through the parent's bus after a fork raises a typed error at once."""
    assert run(FORKED_CHILD, tmp_path / "w") == 0


@left_to(PROCESSES, "a remote client does not carry the trace (external F5b)")
async def test_a_client_publishes_with_the_current_trace(tmp_path: Path) -> None:
    """An event published within a span has the span's trace id."""
    tracer = TracerProvider().get_tracer("tests")
    async with running_node(tmp_path) as node, Client(node.url, node.token("w", roles=["admin"])) as client:
        with tracer.start_as_current_span("order") as span:
            stored = await client.publish("orders", {}, type="PLACED", space=SPACE)
        headers = {"Authorization": f"Bearer {node.token('w', roles=['admin'])}"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            answer = (await http.get(f"/v1/events/{stored.seq}")).json()
        assert answer["meta"]["trace_id"] == trace.format_trace_id(span.get_span_context().trace_id)


@left_to(PROCESSES, "the parameters of the second form are named `event` and `topic` (external F19)")
async def test_publish_takes_topic_and_payload_by_name(tmp_path: Path) -> None:
    """``publish(topic=..., payload=...)`` stores the event."""
    async with Bus(tmp_path / "w") as bus:
        publish: Any = bus.publish
        try:
            stored = await publish(topic="orders", payload={"n": 1}, type="PLACED", space=SPACE)
        except TypeError as error:
            pytest.fail(str(error))
        assert stored.seq == 1


@left_to(OPERATIONS, "hidden plugins can be named by nine answers (ledger 9)")
async def test_no_answer_names_a_hidden_plugin(tmp_path: Path) -> None:
    """With ``claimants = "tokens"`` a factory's addressing and the list of plugins show tokens, not names."""
    async with stewarding(tmp_path, steward={"claimants": "tokens"}) as node:
        await node.ledger.plugin("org.example.secret").announce_subject("track", [("id", "1")])
        client = await SocketClient.connect(tmp_path)
        answer = await client.ask("list_plugins")
        await client.close()
        assert "org.example" not in str(answer)


@left_to(OPERATIONS, "the client has no verb for administration and drops `current_seq` (ledger 16)")
def test_the_ledger_client_has_every_operation() -> None:
    """Operations that an administrator needs are methods of the client."""
    assert all(hasattr(LedgerClient, name) for name in ("merge_subjects", "split_subject", "create_appointment"))


@left_to(OPERATIONS, "a malformed query is reported before the right is asked (node 18)")
async def test_the_right_is_asked_before_the_query_is_checked(tmp_path: Path) -> None:
    """A caller without rights gets 403 for a request that would be malformed too."""
    async with running_node(tmp_path) as node:
        headers = {"Authorization": f"Bearer {node.token('nobody')}"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            answer = await http.post("/v1/dead-letters/redrive?unknown=1", json={"topic": "orders", "group": 5})
            assert answer.status_code == 403


@left_to(OPERATIONS, "a page of dead letters reads all letters of the topic (bus 13)")
async def test_a_page_of_dead_letters_reads_a_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Listing one of 200 letters through a node reads far fewer than all."""
    read: list[object] = []
    opened_letter = DeadLetterFiles._opened_letter

    def counted(self: DeadLetterFiles, letter: Any, sealed: Any) -> Any:
        read.append(letter)
        return opened_letter(self, letter, sealed)

    async with running_node(tmp_path) as node:
        await node.bus.subscribe("orders", "billing", lambda order: Nack(), max_retries=0, workers=8)
        await node.bus.publish_many([Event(EventMeta("orders", "PLACED", SPACE), {"n": n}) for n in range(200)])
        await node.bus.drain()
        monkeypatch.setattr(DeadLetterFiles, "_opened_letter", counted)
        headers = {"Authorization": f"Bearer {node.token('w', roles=['admin'])}"}
        async with httpx.AsyncClient(base_url=node.url, headers=headers) as http:
            page = (await http.get("/v1/dead-letters?topic=orders&limit=1")).json()
        assert (page["count"], len(page["dead_letters"]), len(read) < 100) == (200, 1, True)


@left_to(OPERATIONS, "the package is not ready to be published (external F17)")
def test_the_package_names_its_pages_and_keeps_developers_extras_apart() -> None:
    """``[project.urls]`` is there, and ``dev`` and ``bench`` are dependency groups."""
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text(encoding="utf-8"))
    assert "urls" in table["project"]
    assert {"dev", "bench"} <= table["dependency-groups"].keys()


@left_to(PAGES, "diagrams are black on black in dark mode (first-hours 10.4)")
def test_diagrams_have_colours_for_dark_mode() -> None:
    """The site's style gives diagrams colours of their own in dark mode."""
    style = (REPOSITORY / "tools/site/static/site.css").read_text(encoding="utf-8")
    assert re.search(r"prefers-color-scheme:\s*dark|data-theme=.dark", style)


@left_to(PAGES, "wide tables of the report are cut off at 390 px (first-hours 10.5)")
def test_a_wide_table_of_the_report_shows_that_it_scrolls() -> None:
    """The report marks a table that is wider than the page."""
    source = (REPOSITORY / "src/tidings/pipeline/report.py").read_text(encoding="utf-8")
    assert re.search(r"\.scroll\{[^}]*(background|mask|box-shadow)", source)
