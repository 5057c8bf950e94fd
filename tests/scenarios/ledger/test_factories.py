"""Factory instances: announced, retracted, taken over after a restart, and gone with their plugin."""

from __future__ import annotations

import asyncio

import pytest

from tests.beyond import Beyond, crossed
from tidings.ledger import (
    ErrorClass,
    InstancePolicy,
    Ledger,
    LedgerError,
    LedgerSettings,
    Manifest,
    Plugin,
    open_ledger,
)
from tidings.ledger.factories import FactoryInstances
from tidings.ledger.subjects import Addressing, Subjects
from tidings.log.memory import MemoryLog
from tidings.testing import VirtualClock

from .support import OUTPUTS, PLAYBACK, FullLog, told

F = "org.example.outputs"


def load(ledger: Ledger, policy: InstancePolicy = InstancePolicy.DYNAMIC) -> Plugin:
    return ledger.plugin(F, None, Manifest(shelves=(OUTPUTS,), instances=policy))


async def instance_ids(ledger: Ledger) -> list[str]:
    return await ledger.read(lambda state: [each.instance_id for each in state.part(FactoryInstances)])


@pytest.mark.req("H31")
async def test_an_instance_is_a_subject_while_it_exists(ledger: Ledger) -> None:
    """
    Announcing makes a subject of the shelf's type, found under plugin and instance id; retracting forgets it and all its relations.
    The happenings have only the length of what was announced with it.
    """
    plugin = load(ledger)
    happenings = ledger.happenings.subscribe()

    canonical_id = await plugin.announce_instance("kitchen", b"stereo")
    subject = await ledger.read(
        lambda state: state.part(Subjects).resolve(Addressing("evo-factory-instance", f"{F}/kitchen"))
    )
    instance = await ledger.read(lambda state: state.part(FactoryInstances).get(F, "kitchen"))
    await ledger.plugin("org.example.other").claim_relation(canonical_id, "like", canonical_id)
    await plugin.retract_instance("kitchen")

    assert subject is not None
    assert (subject.canonical_id, subject.subject_type) == (canonical_id, OUTPUTS)
    assert instance is not None
    assert instance.payload == b"stereo"
    names = {"plugin": F, "instance_id": "kitchen", "canonical_id": canonical_id, "shelf": OUTPUTS}
    ends = {"source_id": canonical_id, "predicate": "like", "target_id": canonical_id}
    assert await told(ledger, happenings) == [
        {"type": "factory_instance_announced", **names, "payload_bytes": 6},
        {"type": "relation_asserted", "plugin": "org.example.other", **ends},
        {"type": "factory_instance_retracted", **names},
        {"type": "subject_forgotten", "plugin": F, "canonical_id": canonical_id, "subject_type": OUTPUTS},
        {
            "type": "relation_forgotten",
            "plugin": F,
            **ends,
            "reason": {"kind": "subject_cascade", "forgotten_subject": canonical_id},
        },
    ]
    assert await instance_ids(ledger) == []


async def test_an_instance_is_announced_once(ledger: Ledger) -> None:
    """
    Of two announcements of the same instance, also at once, one is refused; so is retracting one that is not there.
    """
    plugin = load(ledger)

    done = await asyncio.gather(*(plugin.announce_instance("kitchen") for _ in range(2)), return_exceptions=True)
    with pytest.raises(LedgerError) as caught:
        await plugin.retract_instance("cellar")

    assert sorted(type(each).__name__ for each in done) == ["DuplicateInstance", "str"]
    assert (caught.value.error_class, caught.value.subclass) == (ErrorClass.NOT_FOUND, "unknown_instance")


async def test_policies_say_when_instances_may_change(ledger: Ledger) -> None:
    """
    ``startup_only`` refuses to announce after loading, ``shutdown_only`` to retract while loaded; ``dynamic`` allows both.
    """
    startup = load(ledger, InstancePolicy.STARTUP_ONLY)
    await startup.announce_instance("kitchen")
    startup.finish_loading()
    with pytest.raises(LedgerError, match="startup_only") as late:
        await startup.announce_instance("cellar")
    await startup.retract_instance("kitchen")
    await startup.unload()

    shutdown = load(ledger, InstancePolicy.SHUTDOWN_ONLY)
    shutdown.finish_loading()
    await shutdown.announce_instance("kitchen")
    with pytest.raises(LedgerError, match="shutdown_only") as early:
        await shutdown.retract_instance("kitchen")

    assert late.value.subclass == early.value.subclass == "instances_fixed"
    assert await instance_ids(ledger) == ["kitchen"]


@pytest.mark.req("H31")
@pytest.mark.parametrize("policy", InstancePolicy)
async def test_unloading_retracts_all_instances_last_first(ledger: Ledger, policy: InstancePolicy) -> None:
    """
    Whatever the policy, a plugin that is unloaded has its instances retracted, in the reverse order of their announcement.
    """
    plugin = load(ledger, policy)
    for name in ("b", "c", "a"):
        await plugin.announce_instance(name)
    happenings = ledger.happenings.subscribe()

    unloaded = await plugin.unload()

    retracted = [each for each in await told(ledger, happenings) if each["type"] == "factory_instance_retracted"]
    assert [each["instance_id"] for each in retracted] == ["a", "c", "b"]
    assert unloaded.instances == 3
    assert await instance_ids(ledger) == []


async def test_which_shelf_an_instance_is_of_must_be_clear(ledger: Ledger) -> None:
    """
    A plugin on no shelf or on several says which is meant, and it must not be another plugin's. Nor may its name look like an instance's.
    """
    load(ledger)
    plugin = ledger.plugin("org.example.player", None, Manifest(shelves=(PLAYBACK, "audio.second")))

    for shelf in (None, OUTPUTS):
        with pytest.raises(LedgerError) as caught:
            await plugin.announce_instance("one", shelf=shelf)
        assert caught.value.subclass == "not_on_shelf"
    with pytest.raises(LedgerError, match="slash"):
        await ledger.plugin("org.example/player").announce_instance("one", shelf="audio.third")
    await plugin.announce_instance("one", shelf=PLAYBACK)

    assert await instance_ids(ledger) == ["one"]


@pytest.mark.req("H31")
@pytest.mark.bound("ledger.settings.LedgerSettings.instance_grace_s")
@crossed
async def test_instances_that_nobody_announces_again_are_retracted(
    ledger: Ledger, log: MemoryLog, clock: VirtualClock, beyond: Beyond
) -> None:
    """
    After a restart an instance that is announced again keeps its subject; those that are not announced within the grace are retracted.
    """
    plugin = load(ledger)
    kept = await plugin.announce_instance("kept")
    gone = await plugin.announce_instance("gone")
    await ledger.close()

    async with await open_ledger(log, clock=clock) as again:
        happenings = again.happenings.subscribe()
        assert await load(again).announce_instance("kept") == kept
        await clock.advance(29.0)
        assert await instance_ids(again) == ["gone", "kept"]
        with pytest.raises(LedgerError) as caught:
            await again.plugins.request(OUTPUTS, "volume", instance_id="gone")
        assert caught.value.subclass == "unknown_instance"
        await clock.advance(beyond(30) - 29.0)
        await again.read(lambda state: None)

        assert await instance_ids(again) == ["kept"]
        assert [(each["type"], each["canonical_id"]) for each in await told(again, happenings)] == [
            ("factory_instance_announced", kept),
            ("factory_instance_retracted", gone),
            ("subject_forgotten", gone),
        ]


@pytest.mark.req("H31")
async def test_instances_of_a_plugin_that_is_gone_are_retracted(ledger: Ledger, clock: VirtualClock) -> None:
    """
    A plugin that goes without being unloaded, because its connection ends, has as long to come back and announce its instances again.
    """
    plugin = load(ledger)
    for name in ("kept", "gone"):
        await plugin.announce_instance(name)
    ledger.plugins.forget(plugin)
    await clock.advance(29.0)
    await load(ledger).announce_instance("kept")
    assert await instance_ids(ledger) == ["gone", "kept"]
    await clock.advance(2.0)

    assert await instance_ids(ledger) == ["kept"]
    await ledger.close()
    ledger.plugins.forget(ledger.plugin(F))  # with the ledger closed, nothing waits any more
    assert len(asyncio.all_tasks()) == 1


async def test_a_program_without_plugins_leaves_instances_alone(
    ledger: Ledger, log: MemoryLog, clock: VirtualClock
) -> None:
    """
    Opened without a grace, as by a tool that only looks, a ledger keeps the instances that nobody announces again.
    """
    await load(ledger).announce_instance("kept")
    await ledger.close()

    async with await open_ledger(log, clock=clock, settings=LedgerSettings(instance_grace_s=None)) as again:
        await clock.advance(3600)
        assert await instance_ids(again) == ["kept"]


async def test_retracting_abandoned_instances_waits_for_room(clock: VirtualClock) -> None:
    """
    If nothing can be stored when the grace is over, the instances that nobody announced again are retracted when it can.
    """
    log = FullLog(clock=clock)
    async with await open_ledger(log, clock=clock) as ledger:
        await load(ledger).announce_instance("gone")

    async with await open_ledger(log, clock=clock) as again:
        log.is_full = True
        await clock.advance(31.0)
        log.is_full = False
        assert await instance_ids(again) == ["gone"]
        await clock.advance(60.0)

        assert await instance_ids(again) == []


async def test_an_instance_whose_subject_was_merged_is_retracted_under_its_new_id(ledger: Ledger) -> None:
    """
    A merge gives an instance's subject another id; retracting the instance names that one. Nobody else can take its name away.
    """
    plugin = load(ledger)
    await plugin.announce_instance("left")
    await plugin.announce_instance("right")
    admin = ledger.admin("org.example.admin")
    names = [("evo-factory-instance", f"{F}/{side}") for side in ("left", "right")]
    merged = await admin.merge_subjects(*names)
    happenings = ledger.happenings.subscribe()

    with pytest.raises(LedgerError, match="the ledger's own"):
        await admin.force_retract_addressing(F, names[1])
    await plugin.retract_instance("left")
    await plugin.retract_instance("right")

    assert [(each["type"], each["canonical_id"]) for each in await told(ledger, happenings)] == [
        ("factory_instance_retracted", merged),
        ("subject_addressing_removed", merged),
        ("factory_instance_retracted", merged),
        ("subject_forgotten", merged),
    ]
