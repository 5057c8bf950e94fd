"""Which plugins are loaded, which stands on which shelf, and how a call finds the right one."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

import msgspec

from tidings.core.errors import TidingsError
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait
from tidings.happenings.variants import PluginAdmitted, PluginFailed, PluginUnloaded

from .admins import Admin
from .commands import check_name
from .custody import Custodies, CustodyRecord
from .errors import (
    InvalidCommand,
    LedgerClosed,
    LedgerError,
    PluginAlreadyLoaded,
    ShelfEmpty,
    ShelfOccupied,
    ShuttingDown,
    UnknownCustody,
    UnknownInstance,
)
from .factories import FactoryInstances, RetractInstance
from .flight_mode import FLIGHT_MODE_SET, SetFlightMode, is_flight_mode_shelf
from .handlers import Handler, InteractionKind, Manifest, PluginRequest, Respondent, Warden
from .plugins import CustodyHandle, Plugin, do_all

if TYPE_CHECKING:
    from .ledger import Ledger

logger = logging.getLogger(__name__)

_DRAIN_STAGE_S_MAX: Final = 2.0
_RETRY_S: Final = 10.0


class PluginEntry(msgspec.Struct, frozen=True):
    """A plugin on a shelf."""

    name: str
    shelf: str | None
    interaction_kind: InteractionKind
    version: str | None


class _FlightMode(msgspec.Struct, forbid_unknown_fields=True):
    on: bool


class Plugins:
    """
    The plugins of this process.

    They are no state of the ledger: after a restart a plugin is there when it is loaded again. What it has done stays.

    Args:
        ledger: Where they do it.
        instance_grace_s: After so long, factory instances of plugins that are gone and did not announce them again are retracted; ``None`` leaves
            them, in a program that loads no plugins.
    """

    def __init__(self, ledger: Ledger, *, instance_grace_s: float | None) -> None:
        self._ledger = ledger
        self._instance_grace_s = instance_grace_s
        self._plugins: dict[str, Plugin] = {}
        self._shelves: dict[str, Plugin] = {}
        self._is_draining = False
        self._is_closed = False
        self._retracting: set[asyncio.Task[None]] = set()

    def plugin(self, name: str, handler: Handler | None = None, manifest: Manifest | None = None) -> Plugin:
        """See ``Ledger.plugin``."""
        loaded = self._plugins.get(name)
        if loaded is not None:
            if handler is None and manifest is None:
                return loaded
            raise PluginAlreadyLoaded(name)
        if self._is_draining:
            raise ShuttingDown
        check_name("plugin", name)
        if handler is not None and not isinstance(handler, Respondent | Warden):
            raise TypeError(f"{handler!r:.80} is neither a Respondent nor a Warden")
        manifest = checked(Manifest() if manifest is None else manifest, "manifest")
        for shelf in manifest.shelves:
            check_name("shelf", shelf)
            occupant = self._shelves.get(shelf)
            if occupant is not None:
                raise ShelfOccupied(shelf, occupant.name)
        plugin = Plugin(name, handler, manifest, ledger=self._ledger, directory=self)
        self._plugins[name] = plugin
        self._shelves.update(dict.fromkeys(manifest.shelves, plugin))
        admitted = PluginAdmitted(at_ms=self._now_ms(), plugin=name, shelves=manifest.shelves, version=manifest.version)
        self._ledger.emit_soon(admitted)
        return plugin

    def admin(self, name: str, *, is_rehearsal: bool = False) -> Admin:
        """See ``Ledger.admin`` and, for ``is_rehearsal``, ``Admin``."""
        return Admin(check_name("admin", name), ledger=self._ledger, plugins=self, is_rehearsal=is_rehearsal)

    @property
    def loaded(self) -> Sequence[Plugin]:
        """Every plugin, in the order in which they were loaded."""
        return tuple(self._plugins.values())

    def inventory(self) -> Sequence[PluginEntry]:
        """Every plugin and its shelves, in the order in which they were loaded."""
        return [
            PluginEntry(plugin.name, shelf, plugin.interaction_kind, plugin.manifest.version)
            for plugin in self._plugins.values()
            for shelf in plugin.manifest.shelves or (None,)
        ]

    def is_loaded(self, name: str) -> bool:
        """Whether there is a plugin of this name."""
        return name in self._plugins

    def has_handler(self, name: str) -> bool:
        """Return whether a plugin of this name is loaded and is called: it has a handler here, or a connection serves it."""
        plugin = self._plugins.get(name)
        return plugin is not None and plugin.has_handler

    def occupant(self, shelf: str) -> Plugin | None:
        """The plugin on a shelf."""
        return self._shelves.get(shelf)

    def forget(self, plugin: Plugin, reason: str = "it was gone without being unloaded") -> None:
        """
        Have a plugin loaded no more: it was unloaded, or it is simply gone.

        What one that is gone announced and claimed stays; its factory instances for as long as it may take to announce them again.

        Args:
            plugin: Which.
            reason: Why it is gone, if it was not unloaded.
        """
        del self._plugins[plugin.name]
        for shelf in plugin.manifest.shelves:
            del self._shelves[shelf]
        if plugin.is_ending:
            self._ledger.emit_soon(PluginUnloaded(at_ms=self._now_ms(), plugin=plugin.name))
        else:
            self._ledger.emit_soon(PluginFailed(at_ms=self._now_ms(), plugin=plugin.name, reason=reason))
            self._retract_later({plugin.load_id})

    def _now_ms(self) -> int:
        return self._ledger.clock.now_ns() // 1_000_000

    # Calls that find their plugin by its shelf

    async def request(
        self, shelf: str, request_type: str, payload: bytes = b"", *, instance_id: str | None = None
    ) -> bytes:
        """
        Ask the plugin on a shelf.

        After ``flight_mode.set`` with ``{"on": true}`` or ``{"on": false}`` was answered by a plugin of the rack ``flight_mode``, the new mode is
        recorded and told.

        Args:
            shelf: Where.
            request_type: What is asked.
            payload: For the plugin.
            instance_id: Which of a factory's instances is meant.

        Raises:
            ShelfEmpty: There is no plugin.
            Misrouted: It answers no requests.
            UnknownInstance: It has no such instance.
            InvalidCommand: The payload of ``flight_mode.set`` is something else.
            LedgerError: As the plugin answered, or could not.
        """
        check_name("request_type", request_type)
        plugin = self._on(shelf)
        request = PluginRequest(shelf=shelf, request_type=request_type, payload=payload, instance_id=instance_id)
        if instance_id is not None:
            await self._require_instance(plugin, instance_id)
        mode = None
        if request_type == FLIGHT_MODE_SET and is_flight_mode_shelf(shelf):
            try:
                mode = msgspec.json.decode(payload, type=_FlightMode)
            except msgspec.DecodeError as error:
                raise InvalidCommand("payload", f'is not {{"on": true}} or {{"on": false}}: {error}') from None
        answer = await plugin.handle_request(request)
        if mode is not None:
            try:
                await self._ledger.execute(SetFlightMode(rack_class=shelf, on=mode.on))
            except TidingsError:  # the radios are switched all the same, which is what the answer says
                logger.exception("the flight mode of %r could not be recorded", shelf)
        return answer

    async def take_custody(self, shelf: str, custody_type: str, payload: bytes = b"") -> CustodyHandle:
        """Have the plugin on a shelf take custody of work: ``Plugin.take_custody``."""
        return await self._on(shelf).take_custody(shelf, custody_type, payload)

    async def correct_course(self, shelf: str, handle_id: str, correction_type: str, payload: bytes = b"") -> None:
        """Have the plugin on a shelf change its work: ``Plugin.correct_course``."""
        plugin = await self._with_custody(shelf, handle_id)
        await plugin.correct_course(handle_id, correction_type, payload)

    async def release_custody(self, shelf: str, handle_id: str) -> CustodyRecord:
        """Have the plugin on a shelf end its work: ``Plugin.release_custody``."""
        plugin = await self._with_custody(shelf, handle_id)
        return await plugin.release_custody(handle_id)

    def _on(self, shelf: str) -> Plugin:
        plugin = self._shelves.get(shelf)
        if plugin is None:
            raise ShelfEmpty(shelf)
        return plugin

    async def _with_custody(self, shelf: str, handle_id: str) -> Plugin:
        """The plugin on a shelf, if it has this custody there, and not on another of its shelves."""
        plugin = self._on(shelf)
        record = await self._ledger.read(lambda state: state.part(Custodies).require(plugin.name, handle_id))
        if record.shelf != shelf:
            raise UnknownCustody(plugin.name, handle_id)
        return plugin

    async def _require_instance(self, plugin: Plugin, instance_id: str) -> None:
        instance = await self._ledger.read(lambda state: state.part(FactoryInstances).get(plugin.name, instance_id))
        if instance is None or instance.load_id != plugin.load_id:
            raise UnknownInstance(plugin.name, instance_id)

    # Beginning and end

    async def start(self) -> None:
        """Give those who announced factory instances before the ledger was opened time to announce them again."""
        earlier = await self._ledger.read(lambda state: {each.load_id for each in state.part(FactoryInstances)})
        self._retract_later(earlier)

    def _retract_later(self, load_ids: set[str]) -> None:
        if load_ids and self._instance_grace_s is not None and not self._is_closed:
            task = asyncio.create_task(self._retract_abandoned(load_ids, self._instance_grace_s))
            self._retracting.add(task)
            task.add_done_callback(self._retracting.discard)

    async def _retract_abandoned(self, load_ids: set[str], grace_s: float) -> None:
        """Retract, after a while, the instances that these lives of plugins announced; what was announced again is another life's."""
        left_count = 1
        while left_count:
            await self._ledger.clock.sleep(grace_s)
            grace_s = max(grace_s, _RETRY_S)
            try:
                instances = await self._ledger.read(
                    lambda state: [each for each in state.part(FactoryInstances) if each.load_id in load_ids]
                )
                for each in instances:
                    logger.warning("nobody announced the instance %r of %r again", each.instance_id, each.plugin)
                commands = [
                    RetractInstance(plugin=each.plugin, instance_id=each.instance_id) for each in reversed(instances)
                ]
                left_count = len(instances) - await do_all(self._ledger, commands)
            except LedgerClosed:
                return
            except LedgerError as error:  # no state at the moment
                logger.warning("instances that nobody announced again are still there: %s", error)

    async def drain(self, seconds: float = 8.0) -> None:
        """
        Unload all plugins, as before the end of the program that offers the ledger to others.

        No more is asked of any; then all factory instances go, then all custodies, then the addressings, each of the last plugin first.
        Calls under way and wardens that let go have a quarter of the time each, and 2 seconds at most.

        Args:
            seconds: How long it may take where plugins are asked.
        """
        self._is_draining = True
        each_s = min(_DRAIN_STAGE_S_MAX, seconds / 4)
        last_first = [plugin for plugin in reversed(self._plugins.values()) if not plugin.is_ending]
        await asyncio.gather(*(plugin.end_calls(each_s) for plugin in last_first))
        for plugin in last_first:
            await plugin.retract_instances()
        await asyncio.gather(*(plugin.release_custodies(each_s) for plugin in last_first))
        for plugin in last_first:
            await plugin.leave()

    async def close(self) -> None:
        """Stop what runs in the background. Nothing is unloaded, and all state stays as it is."""
        self._is_closed = True
        tasks = tuple(self._retracting)
        await cancel_and_wait(*tasks)
