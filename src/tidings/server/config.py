"""
Where a node's settings come from: defaults, a TOML file, the environment, the command line; each overrides those before it.

This is the only module that reads the environment. ``TIDINGS_SERVER__PORT=9000`` sets ``server.port``: a section, two
underscores, a key; values that are lists or tables are written as JSON. ``TIDINGS_JWT_SECRET`` (or ``TIDINGS_JWT_SECRET_FILE``,
the name of a file that holds it) is the secret of the tokens.

Everything is decoded at once, before anything starts: a misspelt key is refused by its full path, with the name that was
probably meant. A secret's value is in no message and in no print-out.
"""

from __future__ import annotations

import difflib
import os
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
import msgspec.inspect

from tidings.core.errors import SettingsError
from tidings.core.settings import is_secret, settings_from

from .settings import NodeSettings

__all__ = ["REDACTED", "changed_paths", "load_settings", "printable"]

REDACTED: Final = "<secret>"
_PREFIX: Final = "TIDINGS_"
_CONFIG_BYTES_MAX: Final = 1 << 20
_FILE_BYTES_MAX: Final = 256 << 10
# Read by options of the command line, or by its environment; not settings of the node.
_NOT_SETTINGS: Final = frozenset(
    {"TIDINGS_WORKSPACE", "TIDINGS_KEY_FILE", "TIDINGS_TOKEN", "TIDINGS_CONFIG", "TIDINGS_URL"}
)


def load_settings(
    config_file: Path | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    overrides: Mapping[str, object] | None = None,
    defaults: Mapping[str, object] | None = None,
) -> NodeSettings:
    """
    A node's settings.

    Args:
        config_file: A TOML file with a table a section.
        environment: The variables to look at; the process's own if left out.
        overrides: Values by dotted path (``server.port``), as the command line gives them; ``None`` leaves a setting alone.
        defaults: Values by dotted path, for what neither the file nor the environment says.

    Raises:
        SettingsError: The file cannot be read, a key is unknown, or a value is out of its range.
    """
    tree = _from_file(config_file) if config_file is not None else {}
    shape = msgspec.inspect.type_info(NodeSettings)
    for path, text in _from_environment(os.environ if environment is None else environment):
        _put(tree, path, _parsed(text, _type_at(shape, path)))
    for dotted, value in (overrides or {}).items():
        if value is not None:
            _put(tree, tuple(dotted.split(".")), value)
    for dotted, value in (defaults or {}).items():
        _put_if_missing(tree, tuple(dotted.split(".")), value)
    _refuse_unknown(tree, shape, ())
    _read_key_set(tree)
    return settings_from(NodeSettings, tree)


def printable(settings: NodeSettings) -> dict[str, Any]:
    """The settings as plain values for people and programs, without secrets."""
    plain: dict[str, Any] = _without_secrets(msgspec.to_builtins(settings))
    return plain


def changed_paths(old: NodeSettings, new: NodeSettings) -> list[str]:
    """The dotted paths of the settings that differ, in their order."""
    return list(_differences(old, new, ""))


def _from_file(path: Path) -> dict[str, Any]:
    try:
        with path.open("rb") as file:
            text = file.read(_CONFIG_BYTES_MAX + 1)
        if len(text) > _CONFIG_BYTES_MAX:
            raise SettingsError(str(path), f"is longer than {_CONFIG_BYTES_MAX} bytes")
        return tomllib.loads(text.decode())
    except OSError as error:
        raise SettingsError(str(path), f"cannot be read: {error.strerror or error}") from error
    except UnicodeDecodeError as error:
        raise SettingsError(str(path), "is not UTF-8") from error
    except tomllib.TOMLDecodeError as error:
        raise SettingsError(str(path), f"is not TOML: {error}") from None


def _read_key_set(tree: dict[str, Any]) -> None:
    """Put the key set's file in the place of its text."""
    server = tree.get("server")
    path = server.get("key_set_file") if isinstance(server, dict) else None
    if isinstance(path, str):
        _put(tree, ("access", "tokens", "key_set"), _text_in(path, "server.key_set_file"))


def _from_environment(environment: Mapping[str, str]) -> Iterator[tuple[tuple[str, ...], str]]:
    for name in sorted(environment):
        if not name.startswith(_PREFIX) or name in _NOT_SETTINGS:
            continue
        value = environment[name]
        if name == "TIDINGS_JWT_SECRET":
            yield _JWT_SECRET, value
        elif name == "TIDINGS_JWT_SECRET_FILE":
            yield _JWT_SECRET, _text_in(value, name)
        elif "__" in name:
            yield tuple(part.lower() for part in name.removeprefix(_PREFIX).split("__")), value
        else:
            known = [*_NOT_SETTINGS, "TIDINGS_JWT_SECRET", "TIDINGS_JWT_SECRET_FILE", *_environment_names()]
            raise SettingsError(name, f"no such variable{_meant(name, known)}")


_JWT_SECRET: Final = ("access", "tokens", "secret")


def _text_in(path: str, setting: str) -> str:
    try:
        with open(path, "rb") as file:
            text = file.read(_FILE_BYTES_MAX + 1)
        if len(text) > _FILE_BYTES_MAX:
            raise SettingsError(setting, f"{path}: is longer than {_FILE_BYTES_MAX} bytes")
        return text.decode().strip()
    except OSError as error:
        raise SettingsError(setting, f"{path}: {error.strerror or error}") from error
    except UnicodeDecodeError:
        raise SettingsError(setting, f"{path}: is not UTF-8") from None


def _parsed(value: str, kind: msgspec.inspect.Type | None) -> object:
    """A value from the environment: JSON where the setting is a list or a table, text otherwise."""
    if isinstance(kind, _MANY) and value[:1] in ("[", "{"):
        try:
            return msgspec.json.decode(value)
        except msgspec.DecodeError:
            return value
    return value


_MANY: Final = (
    msgspec.inspect.DictType,
    msgspec.inspect.ListType,
    msgspec.inspect.StructType,
    msgspec.inspect.VarTupleType,
)


def _type_at(kind: msgspec.inspect.Type, path: Sequence[str]) -> msgspec.inspect.Type | None:
    """The type of the setting at a path, as far as it can be told from the path."""
    for part in path:
        match kind:
            case msgspec.inspect.StructType(fields=fields):
                found = next((field.type for field in fields if field.encode_name == part), None)
                if found is None:
                    return None
                kind = found
            case msgspec.inspect.DictType(value_type=value_type):
                kind = value_type
            case _:
                return None
    return kind


def _put(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    for depth, part in enumerate(path[:-1]):
        inner = tree.setdefault(part, {})
        if not isinstance(inner, dict):
            raise SettingsError(".".join(path[: depth + 1]), "is a section, and was given a single value")
        tree = inner
    tree[path[-1]] = value


def _put_if_missing(tree: dict[str, Any], path: Sequence[str], value: object) -> None:
    place: object = tree
    for part in path:
        place = place.get(part) if isinstance(place, dict) else None
    if place is None:
        _put(tree, path, value)


def _refuse_unknown(tree: object, kind: msgspec.inspect.Type, path: tuple[str, ...]) -> None:
    """Walk the given values along the settings' types; the first key that is no setting is refused by its path."""
    match kind:
        case msgspec.inspect.StructType(fields=fields) if isinstance(tree, dict):
            known = {field.encode_name: field.type for field in fields}
            for name, value in tree.items():
                if name not in known:
                    raise SettingsError(".".join((*path, str(name))), f"no such setting{_meant(name, known)}")
                _refuse_unknown(value, known[name], (*path, name))
        case msgspec.inspect.DictType(value_type=value_type) if isinstance(tree, dict):
            for name, value in tree.items():
                _refuse_unknown(value, value_type, (*path, str(name)))
        case msgspec.inspect.UnionType(types=types):
            for each in types:
                if isinstance(each, msgspec.inspect.StructType | msgspec.inspect.DictType):
                    _refuse_unknown(tree, each, path)
        case _:
            pass


def _meant(name: str, known: Mapping[str, object] | Sequence[str]) -> str:
    close = difflib.get_close_matches(str(name), list(known), n=1, cutoff=0.6)
    return f"; did you mean {close[0]!r}?" if close else ""


def _environment_names() -> Iterator[str]:
    described = msgspec.inspect.type_info(NodeSettings)
    assert isinstance(described, msgspec.inspect.StructType)
    for section in described.fields:
        if isinstance(section.type, msgspec.inspect.StructType):
            for field in section.type.fields:
                yield f"{_PREFIX}{section.name.upper()}__{field.name.upper()}"


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: REDACTED if inner and is_secret(name) else _without_secrets(inner) for name, inner in value.items()
        }
    return value


def _differences(old: Any, new: Any, path: str) -> Iterator[str]:
    if isinstance(old, msgspec.Struct) and type(old) is type(new):
        for name in old.__struct_fields__:
            yield from _differences(getattr(old, name), getattr(new, name), f"{path}.{name}".lstrip("."))
    elif old != new:
        yield path
