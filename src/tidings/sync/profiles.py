"""
What makes an event valid, by profile: everything that can be said without looking at the log.

``canonical``: ``{"type": "event", "payload": {"schema", "data", "meta"?}}``, the data valid by a registered JSON Schema.
``compatibility``: changes of trees, of registered targets. Whether a change fits the state is ``tree``'s to say.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Final

import jsonschema_rs

from tidings.wire.sync_frames import ItemError

from .errors import InvalidSchema
from .requests import ConnectRequest, SubmittedItem
from .settings import SyncSettings
from .tree import Change, parse_change

TREE_TYPES: Final = ("set", "unset", "treePush", "treeDelete", "treeUpdate", "treeMove")
_PAYLOAD_KEYS: Final = frozenset({"schema", "data", "meta"})
_ERRORS_MAX: Final = 8
# Each name is a level of the state. With the bounds on values and trees this keeps states within what JSON parsers take.
_TARGET_NAMES_MAX: Final = 32


def choose_profile(offered: Sequence[str], request: ConnectRequest) -> str | None:
    """The profile of a connection: the one it requires, else the first offered one it speaks; ``None`` if none fits."""
    required = request.required_profile
    if required is not None:
        fits = [required] if required in offered and required in request.supported_profiles else []
    else:
        fits = [profile for profile in offered if profile in request.supported_profiles]
    if not fits:
        return None
    if fits[0] == "compatibility" and request.required_tree_policy not in (None, "strict"):
        return None
    return fits[0]


class Profiles:
    """
    The validators of one set of settings, compiled once.

    Raises:
        InvalidSchema: A schema cannot be compiled.
    """

    def __init__(self, settings: SyncSettings) -> None:
        self._schemas = {name: _compiled(name, schema) for name, schema in settings.schemas.items()}
        self._project_schemas = {name: _compiled(name, schema) for name, schema in settings.project_schemas.items()}
        self._targets = {
            name: (frozenset(target.actions), _compiled(name, target.value_schema) if target.value_schema else None)
            for name, target in settings.tree_targets.items()
        }

    def check_canonical(self, item: SubmittedItem) -> tuple[ItemError, ...]:
        """What is wrong with an event of the canonical profile; nothing if it is valid."""
        if item.type != "event":
            return (ItemError(field="event.type", message=f"{item.type[:64]!r} is not accepted in this profile"),)
        payload: Mapping[str, Any] = item.body
        schema = payload.get("schema")
        if type(schema) is not str:
            return (ItemError(field="event.payload.schema", message="must be a string"),)
        if "data" not in payload:
            return (ItemError(field="event.payload.data", message="is required"),)
        if not isinstance(payload.get("meta", {}), dict):
            return (ItemError(field="event.payload.meta", message="must be an object"),)
        if len(payload) > 2 and not _PAYLOAD_KEYS.issuperset(payload):
            other = next(key for key in payload if key not in _PAYLOAD_KEYS)
            return (ItemError(field=f"event.payload.{other[:64]}", message="is not a field of a canonical event"),)
        validator = self._schemas.get(schema) or self._schemas.get("*")
        if validator is None:
            return (ItemError(field="event.payload.schema", message=f"{schema[:64]!r} is not registered"),)
        if validator.is_valid(payload["data"]):
            return ()
        return _schema_errors(validator, payload["data"], "event.payload.data")

    def check_project(self, item: SubmittedItem) -> tuple[ItemError, ...]:
        """What is wrong with an event of dialect B or C; nothing if its type has no schema."""
        validator = self._project_schemas.get(item.type) or self._project_schemas.get("*")
        if validator is None or validator.is_valid(item.body["payload"]):
            return ()
        return _schema_errors(validator, item.body["payload"], "payload")

    def check_tree(self, item: SubmittedItem) -> Change | tuple[ItemError, ...]:
        """The change that an event of the tree profile asks for, or what is wrong with it whatever the state."""
        if item.type not in TREE_TYPES:
            return (ItemError(field="event.type", message=f"{item.type[:64]!r} is not accepted in this profile"),)
        change = parse_change(item.type, item.body)
        if isinstance(change, ItemError):
            return (change,)
        if change.target.count(".") >= _TARGET_NAMES_MAX:
            return (ItemError(field="event.payload.target", message=f"has more than {_TARGET_NAMES_MAX} names"),)
        target = self._targets.get(change.target) or self._targets.get("*")
        if target is None:
            return (ItemError(field="event.payload.target", message="is not registered"),)
        actions, validator = target
        if item.type not in actions:
            return (ItemError(field="event.type", message="is not allowed for this target"),)
        if validator is not None and "value" in item.body and not validator.is_valid(change.value):
            return _schema_errors(validator, change.value, "event.payload.value")
        return change


def _compiled(name: str, schema: Mapping[str, Any]) -> jsonschema_rs.Validator:
    try:
        # Offline: a schema must not make the server fetch an address that somebody wrote into it.
        return jsonschema_rs.validator_for(dict(schema), offline=True)
    except (ValueError, jsonschema_rs.ReferencingError, TypeError) as error:
        raise InvalidSchema(name, str(error).partition("\n")[0]) from error


def _schema_errors(validator: jsonschema_rs.Validator, value: Any, field: str) -> tuple[ItemError, ...]:
    errors: list[ItemError] = []
    for error in validator.iter_errors(value):
        path = "".join(f".{part}" for part in error.instance_path)
        errors.append(ItemError(field=f"{field}{path}", message=str(error.message)[:200]))
        if len(errors) == _ERRORS_MAX:
            break
    return tuple(errors)
