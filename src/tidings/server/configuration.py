"""
The node's settings while it runs: one place that changes them, all or nothing.

A change comes by SIGHUP, which reads the file again, or by ``PATCH /v1/config``, which overrides single settings until they are taken back or
the node ends. Either way it is prepared first: each owner of a part of the settings, in a fixed order, looks at the new values and may
veto them, changing nothing. Only when nobody has is the change committed, in the same order, and ``cfg_seq`` grows. Every change, and
every one that was refused, is put on record and told to administrators; values that are secret are in neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any, Final, NamedTuple

from tidings.access.announcements import Announcer
from tidings.access.audit import AuditLog, AuditRecord
from tidings.core.errors import SettingsError, TidingsError
from tidings.core.settings import checked

from .errors import SettingsVetoed
from .settings import NodeSettings, Reload, plan_reload, with_values

logger = logging.getLogger(__name__)

_OVERRIDES_MAX: Final = 256


class SettingsOwner(NamedTuple):
    """A part of the node that settings concern."""

    name: str
    prepare: Callable[[NodeSettings, NodeSettings], None]
    """Given the old and the new settings: raises a ``TidingsError`` if it cannot go on with these. Changes nothing."""
    commit: Callable[[NodeSettings, NodeSettings], None]
    """Goes on with the new ones. Must not fail."""


class ConfigManager:
    """
    Holds the settings in force.

    Args:
        settings: Those that the node was started with.
        audit: Where changes are put on record.
    """

    def __init__(self, settings: NodeSettings, audit: AuditLog | None = None) -> None:
        self.settings = settings
        """In force now."""
        self.cfg_seq = 1
        """Counts changes."""
        self.announcer = Announcer("config_manager")
        self.problem: str | None = None
        """Why the settings in force are not those of every part; ``None`` as long as all changes could be made."""
        self._audit = audit
        self._owners: list[SettingsOwner] = []
        self._base = settings
        self._overrides: dict[str, Any] = {}

    def add_owner(
        self,
        name: str,
        prepare: Callable[[NodeSettings, NodeSettings], None],
        commit: Callable[[NodeSettings, NodeSettings], None],
    ) -> None:
        """Ask this part too, after those there are."""
        self._owners.append(SettingsOwner(name, prepare, commit))

    @property
    def overrides(self) -> Mapping[str, Any]:
        """What was changed while the node runs, by dotted path."""
        return dict(self._overrides)

    def reload(self, settings: NodeSettings, *, by: str = "process") -> Reload:
        """
        Go on with settings that were read again; overrides stay.

        Returns:
            What was applied, and what needs a restart.

        Raises:
            SettingsError: They are not valid.
            SettingsVetoed, or what a part raises: It cannot go on with them. Nothing was changed.
        """
        try:
            base = checked(settings)
            plan = self._plan(with_values(base, self._overrides))
        except SettingsError as error:
            self._refuse(error, (error.path,), by)
            raise
        self._change(plan, by)
        self._base = base
        return plan

    def override(self, values: Mapping[str, Any], *, by: str) -> Reload:
        """
        Change single settings while the node runs.

        Args:
            values: By dotted path; ``None`` takes an override back.
            by: Who wants it.

        Raises:
            SettingsError: One is unknown or out of its range, or there are too many.
            SettingsVetoed: One needs a restart, or a part cannot go on with it. Nothing was changed.
        """
        wanted = {**self._overrides, **values}
        wanted = {path: value for path, value in wanted.items() if value is not None}
        try:
            if len(wanted) > _OVERRIDES_MAX:
                raise SettingsError("config", f"there are more than {_OVERRIDES_MAX} overrides")
            plan = self._plan(with_values(self._base, wanted))
        except SettingsError as error:
            self._refuse(error, (error.path,), by)
            raise
        touched = [path for path in plan.kept if any(path == each or path.startswith(f"{each}.") for each in values)]
        if touched:
            vetoed = SettingsVetoed("node", touched[0], "takes effect at the next start only")
            self._refuse(vetoed, tuple(touched), by)
            raise vetoed
        try:
            self._change(plan, by)
        except SettingsVetoed:
            raise
        except TidingsError as error:
            raise SettingsVetoed("node", ", ".join(plan.applied), f"cannot be used: {error.public_text}") from error
        self._overrides = wanted
        return plan

    def _plan(self, wanted: NodeSettings) -> Reload:
        plan = plan_reload(self.settings, wanted)
        checked(plan.settings)  # what is kept may not fit what is new
        return plan

    def _change(self, plan: Reload, by: str) -> None:
        old, new = self.settings, plan.settings
        for owner in self._owners:
            try:
                owner.prepare(old, new)
            except TidingsError as error:
                self._refuse(error, plan.applied, by, owner.name)
                raise
        if plan.applied and self._audit is not None:
            self._audit.note(
                AuditRecord(
                    category="config.changed",
                    kind="operational",
                    subject=by,
                    data={"keys": list(plan.applied), "cfg_seq": self.cfg_seq + 1},
                )
            )
        self.problem = None
        for owner in self._owners:
            try:
                owner.commit(old, new)
            except Exception as error:
                # The others go on with the new ones: the node says that it is not ready until a change could be made by all.
                logger.exception("new settings failed at %s", owner.name)
                self.problem = f"new settings failed at {owner.name}: {type(error).__name__}"
        self.settings = new
        if self.problem is not None:
            failed = SettingsVetoed("node", ", ".join(plan.applied), "could not be applied by every part")
            self._refuse(failed, plan.applied, by)
            raise failed
        if plan.applied:
            self.cfg_seq += 1
            self.announcer.tell("system.config_changed", {"cfg_seq": self.cfg_seq, "keys": plan.applied[:64]})

    def _refuse(self, error: TidingsError, keys: tuple[str, ...], by: str, owner: str = "node") -> None:
        if self._audit is not None:
            self._audit.note(
                AuditRecord(
                    category="config.rejected",
                    kind="operational",
                    severity="warn",
                    subject=by,
                    data={"keys": list(keys), "owner": owner, "error": error.code, "problem": error.public_text},
                )
            )
        self.announcer.tell("system.config_rejected", {"keys": keys[:64], "owner": owner, "reason": error.code})
