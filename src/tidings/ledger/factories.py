"""
Factory instances: things that a plugin makes and that are subjects while they exist.

An instance is announced by its plugin under an id of the plugin's own. The ledger makes a subject of it, whose type is the shelf, and which
is found under the addressing ``evo-factory-instance:<plugin>/<instance id>``.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, ClassVar, Final

import msgspec

from tidings.happenings.variants import FactoryInstanceAnnounced, FactoryInstanceRetracted

from .claims import announce, retract, weight_of
from .commands import Command, CommandOutcome, check_name, check_payload
from .errors import DuplicateInstance, InvalidCommand, UnknownInstance
from .state import LedgerState
from .subjects import Addressing

FACTORY_SCHEME: Final = "evo-factory-instance"


class FactoryInstance(msgspec.Struct, frozen=True):
    """One instance."""

    plugin: str
    instance_id: str
    shelf: str
    payload: bytes
    load_id: str
    """Which life of the plugin announced it."""
    announced_at_ms: int


def addressing_of(plugin: str, instance_id: str) -> Addressing:
    """Under which an instance's subject is found."""
    return Addressing(FACTORY_SCHEME, f"{plugin}/{instance_id}")


class FactoryInstances:
    """Every instance, by plugin and id, in the order in which they were announced."""

    name: ClassVar[str] = "factory_instances"
    frozen_type: ClassVar[Any] = list[FactoryInstance]

    def __init__(self) -> None:
        self._instances: dict[tuple[str, str], FactoryInstance] = {}

    def freeze(self) -> list[FactoryInstance]:
        return list(self._instances.values())

    def restore(self, frozen: list[FactoryInstance]) -> None:
        self._instances.update(((instance.plugin, instance.instance_id), instance) for instance in frozen)

    def __iter__(self) -> Iterator[FactoryInstance]:
        return iter(self._instances.values())

    def get(self, plugin: str, instance_id: str) -> FactoryInstance | None:
        """The instance, if there is one."""
        return self._instances.get((plugin, instance_id))

    def of_plugin(self, plugin: str) -> Sequence[FactoryInstance]:
        """A plugin's instances, in the order in which they were announced."""
        return [instance for instance in self if instance.plugin == plugin]

    def put(self, instance: FactoryInstance) -> None:
        """Add an instance, as the last."""
        self._instances.pop((instance.plugin, instance.instance_id), None)
        self._instances[instance.plugin, instance.instance_id] = instance

    def drop(self, instance: FactoryInstance) -> None:
        """Remove an instance that is there."""
        del self._instances[instance.plugin, instance.instance_id]


class AnnounceInstance(Command, frozen=True, kw_only=True, omit_defaults=True):
    """
    A plugin has made an instance; the answer is the canonical id of its subject.

    An instance that an earlier life of the plugin (``load_id``) announced is taken over with its subject.
    """

    plugin: str
    instance_id: str
    shelf: str
    load_id: str
    new_id: str
    payload: bytes = b""

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        for field in ("plugin", "instance_id", "shelf", "load_id"):
            check_name(field, getattr(self, field))
        if "/" in self.plugin:
            raise InvalidCommand(
                "plugin", f"{self.plugin!r} holds a slash, which stands between a plugin and its instance"
            )
        check_payload(self.payload)
        instances = state.part(FactoryInstances)
        known = instances.get(self.plugin, self.instance_id)
        if known is not None and known.load_id == self.load_id:
            raise DuplicateInstance(self.plugin, self.instance_id)
        subject, _ = announce(
            state,
            at_ms,
            plugin=self.plugin,
            subject_type=self.shelf,
            addressings=[addressing_of(self.plugin, self.instance_id)],
            new_id=self.new_id,
        )
        assert subject.canonical_id is not None  # one addressing cannot be of two subjects
        instances.put(
            FactoryInstance(
                plugin=self.plugin,
                instance_id=self.instance_id,
                shelf=self.shelf,
                payload=self.payload,
                load_id=self.load_id,
                announced_at_ms=at_ms,
            )
        )
        announced = FactoryInstanceAnnounced(
            at_ms=at_ms,
            plugin=self.plugin,
            instance_id=self.instance_id,
            canonical_id=subject.canonical_id,
            shelf=self.shelf,
            payload_bytes=len(self.payload),
        )
        return CommandOutcome([announced], subject.canonical_id)


class RetractInstance(Command, frozen=True, kw_only=True, omit_defaults=True):
    """An instance is gone, and its subject with it."""

    is_weighed = True
    plugin: str
    instance_id: str

    def weight(self, state: LedgerState) -> int:
        return weight_of(state, addressing_of(self.plugin, self.instance_id))

    def execute(self, state: LedgerState, at_ms: int) -> CommandOutcome:
        instances = state.part(FactoryInstances)
        instance = instances.get(self.plugin, self.instance_id)
        if instance is None:
            raise UnknownInstance(self.plugin, self.instance_id)
        addressing = addressing_of(self.plugin, self.instance_id)
        subject, cascade = retract(state, at_ms, plugin=self.plugin, addressing=addressing)
        instances.drop(instance)
        retracted = FactoryInstanceRetracted(
            at_ms=at_ms,
            plugin=self.plugin,
            instance_id=self.instance_id,
            canonical_id=subject.canonical_id,  # a merge may have given it another one since
            shelf=instance.shelf,
        )
        return CommandOutcome([retracted, *cascade])
