"""
What a happening is: one declaration a variant, from which everything else about it follows. The variants are in ``variants.py``.

A variant is a subclass of ``Happening``. Its JSON form, its labels, what filters compare, which subjects it touches and its line in
the documents all follow from the declaration:

    class DoorOpened(Happening, frozen=True, kw_only=True):
        \"\"\"Somebody opened a door.\"\"\"

        plugin: Plugin
        door_id: Subject
        badge: str | None

- ``type`` in JSON is the class's name in snake case; every variant has ``at_ms``, when it was emitted.
- ``Plugin``, ``Shelf`` and ``Subject`` mark what the filters of the same names compare; a variant without such a field is let through by no
  filter that asks for one.
- Labels, by which subscribers coalesce, are the fields that are text, numbers or truth values and always there. Lists, structures,
  enumerations, optional fields and ``at_ms`` are not. The top-level keys of a ``FreeForm`` object are labels too, but no static ones.

The set is open: a log or a peer may hold variants that this process has not declared. They are read as ``UnknownHappening`` and passed on
as they came.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

import msgspec

from tidings.core.names import snake_case

from .errors import InvalidHappening, VariantDeclaredTwice

Plugin = Annotated[str, msgspec.Meta(extra={"role": "plugin"})]
"""The plugin that a filter on plugins compares."""
Shelf = Annotated[str, msgspec.Meta(extra={"role": "shelf"})]
"""The fully qualified shelf that a filter on shelves compares."""
Subject = Annotated[str, msgspec.Meta(extra={"role": "subject"})]
"""The canonical id of a subject that the happening touches."""
Subjects = Annotated[tuple[str, ...], msgspec.Meta(extra={"role": "subject"})]
"""Canonical ids of subjects that the happening touches."""
OptionalSubject = Annotated[str | msgspec.UnsetType, msgspec.Meta(extra={"role": "subject"})]
FreeForm = Annotated[Any, msgspec.Meta(extra={"role": "free_form"})]
"""JSON of a plugin's own; the top-level keys of an object become labels."""


class Happening(msgspec.Struct, frozen=True, kw_only=True, tag_field="type", tag=snake_case, gc=False):
    """One immutable notice of a change. ``at_ms`` is when it was emitted, in milliseconds since 1970."""

    at_ms: int

    def __init_subclass__(cls, **config: Any) -> None:
        super().__init_subclass__(**config)
        declare(cls)

    @property
    def variant(self) -> str:
        """The variant's name, as JSON's ``type``."""
        return facts_of(type(self)).name

    @property
    def filter_plugin(self) -> str | None:
        """What a filter on plugins compares."""
        name = facts_of(type(self)).plugin
        return None if name is None else getattr(self, name)

    @property
    def filter_shelf(self) -> str | None:
        """What a filter on shelves compares."""
        name = facts_of(type(self)).shelf
        return None if name is None else getattr(self, name)

    @property
    def subjects(self) -> tuple[str, ...]:
        """The canonical ids of the subjects that this touches."""
        found: list[str] = []
        for name in facts_of(type(self)).subjects:
            value = getattr(self, name)
            if isinstance(value, tuple):
                found.extend(value)
            elif isinstance(value, str):
                found.append(value)
        return tuple(found)

    def affects_subject(self, canonical_id: str) -> bool:
        """Whether it touches this subject."""
        return canonical_id in self.subjects

    def labels(self) -> dict[str, str]:
        """Labels and their values, as text."""
        facts = facts_of(type(self))
        labels = {name: _as_text(value) for name, value in self._free_form_items(facts)}
        labels.update((label, _as_text(getattr(self, name))) for label, name in facts.labels.items())
        labels["variant"] = facts.name
        return labels

    def _free_form_items(self, facts: VariantFacts) -> Iterator[tuple[str, Any]]:
        for name in facts.free_form:
            value = getattr(self, name)
            if isinstance(value, Mapping):
                yield from value.items()


class UnknownHappening(msgspec.Struct, frozen=True):
    """A variant that this process has not declared, as it came."""

    variant: str
    fields: dict[str, Any]
    """All of its JSON but ``type``."""
    subjects: ClassVar[tuple[str, ...]] = ()

    @property
    def at_ms(self) -> int:
        """When it was emitted; 0 if it does not say."""
        value = self.fields.get("at_ms")
        return value if type(value) is int else 0

    @property
    def filter_plugin(self) -> str | None:
        """Nothing is known of its fields."""
        return None

    filter_shelf = filter_plugin

    def affects_subject(self, canonical_id: str) -> bool:
        """Nothing is known of its fields."""
        return False

    def labels(self) -> dict[str, str]:
        """Only ``variant``."""
        return {"variant": self.variant}


AnyHappening = Happening | UnknownHappening


class VariantFacts(msgspec.Struct, frozen=True):
    """What follows from a declaration."""

    name: str
    plugin: str | None
    shelf: str | None
    subjects: tuple[str, ...]
    free_form: tuple[str, ...]
    labels: dict[str, str]
    """The field of each label, in the order of declaration."""


_variants: dict[str, type[Happening]] = {}
_facts: dict[type[Happening], VariantFacts] = {}


def declare(variant: type[Happening]) -> None:
    """
    Enter a variant; called for every subclass of ``Happening``.

    Raises:
        VariantDeclaredTwice: Another class has that name.
        InvalidHappening: A field has the name of something that every happening has.
    """
    name = snake_case(variant.__name__)
    for field in inspect.get_annotations(variant):
        if field == "type" or (hasattr(Happening, field) and field != "at_ms"):
            raise InvalidHappening(name, f"no field can be called {field!r}: every happening has that already")
    known = _variants.get(name)
    if known is not None and (known.__module__, known.__qualname__) != (variant.__module__, variant.__qualname__):
        raise VariantDeclaredTwice(name, f"{known.__module__}.{known.__qualname__}")
    _variants[name] = variant


def facts_of(variant: type[Happening]) -> VariantFacts:
    """What follows from the declaration of a variant."""
    facts = _facts.get(variant)
    if facts is None:
        facts = _facts[variant] = _read_facts(variant)
    return facts


def _read_facts(variant: type[Happening]) -> VariantFacts:
    roles: dict[str, list[str]] = {"plugin": [], "shelf": [], "subject": [], "free_form": []}
    labels: dict[str, str] = {}
    for field in msgspec.structs.fields(variant):
        kind = field.type
        if typing.get_origin(kind) is Annotated:
            for meta in kind.__metadata__:
                if isinstance(meta, msgspec.Meta) and meta.extra and "role" in meta.extra:
                    roles[meta.extra["role"]].append(field.name)
            kind = kind.__origin__
        if field.name != "at_ms" and (kind in (str, int, bool) or typing.get_origin(kind) is Literal):
            labels[field.encode_name] = field.name
    return VariantFacts(
        name=snake_case(variant.__name__),
        plugin=next(iter(roles["plugin"]), None),
        shelf=next(iter(roles["shelf"]), None),
        subjects=tuple(roles["subject"]),
        free_form=tuple(roles["free_form"]),
        labels=labels,
    )


def _as_text(value: Any) -> str:
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "true" if value else "false"
    return str(value) if isinstance(value, int) else msgspec.json.encode(value).decode()


def variants() -> dict[str, type[Happening]]:
    """Every declared variant by its name, in the order of declaration. A class whose declaration failed half way is none."""
    return {name: variant for name, variant in _variants.items() if hasattr(variant, "__struct_fields__")}


def variant_count() -> int:
    """A number that rises with every declaration."""
    return len(_variants)


def static_labels(name: str) -> tuple[str, ...]:
    """The labels that every happening of this variant has: ``variant``, then fields as declared. None for an unknown one."""
    variant = _variants.get(name)
    return () if variant is None else ("variant", *facts_of(variant).labels)


def to_json(happening: AnyHappening) -> dict[str, Any]:
    """A happening as JSON has it."""
    if isinstance(happening, UnknownHappening):
        return {"type": happening.variant, **happening.fields}
    form: dict[str, Any] = msgspec.json.decode(msgspec.json.encode(happening))
    return form


def from_json(value: object, *, is_strict: bool = True) -> AnyHappening:
    """
    The happening in a JSON object.

    Args:
        is_strict: Whether a known variant must have the fields that are declared here. What a log holds was written by another version,
            perhaps; without ``is_strict`` such a one is passed on as it came, like an unknown one.

    Raises:
        InvalidHappening: It has no type, or (if strict) a field of a known variant does not fit.
    """
    name = value.get("type") if isinstance(value, Mapping) else None
    if not isinstance(value, Mapping) or not isinstance(name, str):
        raise InvalidHappening("?", "it is no object with a type")
    variant = _variants.get(name)
    if variant is not None:
        try:
            return msgspec.convert(value, variant)
        except (
            msgspec.ValidationError,
            TypeError,
            ValueError,
            NameError,
        ) as error:  # or the class cannot be used at all
            if is_strict:
                raise InvalidHappening(name, str(error)) from None
    return UnknownHappening(name, {key: each for key, each in value.items() if key != "type"})


def check(happening: AnyHappening) -> None:
    """
    Make sure that something is a happening, with fields of the types that are declared.

    Raises:
        InvalidHappening: It is not.
    """
    if isinstance(happening, Happening):
        try:
            from_json(to_json(happening))
        except (TypeError, ValueError, RecursionError) as error:
            raise InvalidHappening(happening.variant, str(error)) from None
    elif not isinstance(happening, UnknownHappening):
        raise InvalidHappening(type(happening).__name__, "it is none of the variants")
