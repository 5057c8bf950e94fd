"""``tidings work``: a bus's subscribers as processes, on the workspace itself and through a node."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from pathlib import Path

import pytest

from tests.integration.cli.support import environment, invoke, started
from tests.integration.node_support import until_answered
from tidings import Bus, Client
from tidings.bus.errors import NotThroughNode
from tidings.client.errors import RemoteStopped
from tidings.core.errors import SettingsError
from tidings.core.events import Event, EventMeta
from tidings.log.interface import Appended, Refused
from tidings.testing.node import running_node

APP = """
from tidings import Bus

bus = Bus("workspace")

@bus.subscriber("orders", group="billing")
async def bill(order: dict[str, int]) -> None:
    await bus.publish("bills", order, type="BILLED", space="shared:shop")

@bus.subscriber("bills", group="mail")
async def mail(bill: dict[str, int]) -> None:
    print("mailed", bill["number"])

silent = Bus("workspace")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a module, and the place where it is looked for."""
    (tmp_path / "shop_app.py").write_text(APP)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "shop_app", raising=False)
    return tmp_path


def edit_unnoticed(path: Path, text: str) -> None:
    """Edit a module so that Python takes its old bytecode for current: the same length, the same modification time in whole seconds."""
    before = path.stat()
    assert len(text.encode()) == before.st_size
    path.write_text(text)
    second_ns, fraction_ns = divmod(before.st_mtime_ns, 1_000_000_000)
    edited_ns = second_ns * 1_000_000_000 + (fraction_ns + 1_000) % 1_000_000_000
    os.utime(path, ns=(edited_ns, edited_ns))


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("nothing_here:bus", "there is no module 'nothing_here'"),
        ("gone.py:bus", "there is no file gone.py"),
        ("two.py", "two.py has 2 buses\nhint: name one of: two.py:first, two.py:second"),
        ("shop_app:no_bus", "has no bus 'no_bus'\nhint: name one of: shop_app:bus, shop_app:silent"),
        ("shop_app:silent", "has no subscribers"),
        ("broken_app", "cannot be imported: ValueError: as it is"),
        ("shop_app.py --processes 2", "serve --dev --workspace"),
    ],
)
def test_what_cannot_work_is_said(folder: Path, target: str, said: str) -> None:
    """A module or a bus that is not there, one without subscribers, and several processes without a node: a sentence, and what to do."""
    (folder / "broken_app.py").write_text("raise ValueError('as it is')")
    (folder / "two.py").write_text("from tidings import Bus\nfirst, second = Bus('a'), Bus('b')\n")

    done = invoke("work", *target.split())

    assert (done.exit_code, said in done.stderr) == (2, True), done.stderr
    assert "tidings/cli/work.py" not in done.stderr


@pytest.mark.slow
async def test_processes_share_groups_through_the_node_and_end_with_the_one_that_started_them(folder: Path) -> None:
    """Two workers join through the node that holds the workspace, a change starts them again, and SIGTERM ends all of them with 0."""
    async with running_node(folder / "workspace") as node:
        env = {**environment(), "TIDINGS_TOKEN": node.token("worker", roles=["admin"])}
        env.pop("PYTHONDONTWRITEBYTECODE", None)  # else there is no bytecode that could be stale

        async def lines(count: int) -> list[str]:
            return [await asyncio.to_thread(process.line) for _ in range(count)]

        async def members() -> list[int | None]:
            return [each.members for each in await node.bus.admin.reports()]

        async def mailed(number: int) -> list[str]:
            await node.bus.publish("orders", {"number": number}, type="PLACED", space="shared:shop")
            return await lines(1)

        with started("work", "shop_app.py", "--processes", "2", "--reload", env=env, cwd=folder) as process:
            assert all(f"orders/billing, bills/mail through {node.url}" in line for line in await lines(2))
            assert await mailed(1) == ["mailed 1"]
            await until_answered(members, [2, 2])
            edit_unnoticed(folder / "shop_app.py", APP.replace("mailed", "posted"))
            await lines(2)
            assert await mailed(2) == ["posted 2"]

            process.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.exit_code) == 0
            assert "shop_app.py has changed" in process.errors()
        await until_answered(members, [0, 0])


async def test_a_bus_works_through_a_node_with_its_own_handlers(tmp_path: Path) -> None:
    """Its subscribers join the node's groups, what it publishes goes to the node, what needs the log itself is refused; cancelling leaves."""
    bus, done = Bus(tmp_path / "none"), asyncio.Event()
    event = Event(EventMeta("orders", "PLACED", "shared:shop", "twice"), {"number": 1})

    @bus.subscriber("orders", group="billing", workers=2, max_retries=3)
    async def bill(order: dict[str, int]) -> None:
        if order["number"] == 1:
            await bus.publish("orders", {"number": 2}, type="PLACED", space="shared:shop")
        else:
            done.set()

    async with running_node(tmp_path / "w") as node:
        running = asyncio.ensure_future(bus.run(Client(node.url, node.token("w", roles=["admin"]))))
        await until_answered(node.bus.groups, [("orders", "billing")])
        stored, refused = await bus.publish_many(
            [event, Event(EventMeta("orders", "PLACED", "shared:shop", "twice"), {"number": 7})]
        )
        async with asyncio.timeout(20):
            await done.wait()
        with pytest.raises(NotThroughNode, match="works through"):
            await bus.drain()
        assert not await bus.cancel_delayed("none")
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)

    assert (isinstance(stored, Appended), isinstance(refused, Refused)) == (True, True)
    assert not (tmp_path / "none").exists()


async def test_what_a_node_does_not_offer_is_refused_before_it_is_asked(tmp_path: Path) -> None:
    """A batch, and a token that the node does not believe, end ``run`` with the reason."""
    bus = Bus(tmp_path / "none")
    bus.subscriber("orders", group="many", batch_count_max=5)(lambda orders: None)
    with pytest.raises(SettingsError, match="batch_count_max"):
        await bus.run(Client("http://127.0.0.1:9", "t"))

    other = Bus(tmp_path / "none")
    other.subscriber("orders", group="one")(lambda order: None)
    async with running_node(tmp_path / "w") as node:
        with pytest.raises(RemoteStopped):
            await other.run(Client(node.url, "x.y.z"))


@pytest.mark.slow
async def test_a_worker_does_not_collect_what_it_was_started_with(folder: Path) -> None:
    """Modules and subscriptions are frozen before the first event: a collection during work passes over them."""
    (folder / "frozen_app.py").write_text(
        'import gc\nfrom tidings import Bus\nbus = Bus("workspace")\n\n'
        '@bus.subscriber("orders", group="billing")\n'
        "async def bill(order: dict[str, int]) -> None:\n"
        '    print("frozen", gc.get_freeze_count() > 10_000, flush=True)\n'
    )
    async with running_node(folder / "workspace") as node:
        env = {**environment(), "TIDINGS_TOKEN": node.token("worker", roles=["admin"])}
        with started("work", "frozen_app.py", env=env, cwd=folder) as process:
            await asyncio.to_thread(process.line)
            await node.bus.publish("orders", {"number": 1}, type="PLACED", space="shared:shop")
            assert await asyncio.to_thread(process.line) == "frozen True"
            process.process.send_signal(signal.SIGTERM)
            assert await asyncio.to_thread(process.exit_code) == 0
