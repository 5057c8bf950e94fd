"""What there is to know about each variant, from its declaration: for documents, for the command line, for clients that ask."""

from __future__ import annotations

import inspect

import msgspec
import msgspec.inspect

from .happening import Happening, facts_of, static_labels, variants


class FieldDescription(msgspec.Struct, frozen=True):
    """A field of a variant."""

    name: str
    """As in JSON."""
    form: str
    """What JSON has there, in words."""


class VariantDescription(msgspec.Struct, frozen=True):
    """A variant. ``at_ms``, which all have, is not among the fields."""

    name: str
    text: str
    fields: tuple[FieldDescription, ...]
    plugin: str | None
    """The field that a filter on plugins compares."""
    shelf: str | None
    """The field that a filter on shelves compares."""
    subjects: tuple[str, ...]
    """The fields that name subjects which it touches."""
    labels: tuple[str, ...]
    """The static ones, by which subscribers may coalesce."""


def describe_variants() -> list[VariantDescription]:
    """Every variant that is declared, in the order of declaration."""
    return [_describe(name, variant) for name, variant in variants().items()]


def _describe(name: str, variant: type[Happening]) -> VariantDescription:
    facts = facts_of(variant)
    described = msgspec.inspect.type_info(variant)
    assert isinstance(described, msgspec.inspect.StructType)
    return VariantDescription(
        name=name,
        text=inspect.cleandoc(variant.__doc__ or "").replace("\n", " "),
        fields=tuple(
            FieldDescription(field.encode_name, _form(field.type) + ("" if field.required else ", or absent"))
            for field in described.fields
            if field.name != "at_ms"
        ),
        plugin=facts.plugin,
        shelf=facts.shelf,
        subjects=facts.subjects,
        labels=static_labels(name),
    )


def _form(kind: msgspec.inspect.Type) -> str:
    match kind:
        case msgspec.inspect.Metadata(type=inner):
            return _form(inner)
        case msgspec.inspect.UnionType(types=types):
            return " or ".join(_form(each) for each in types)
        case msgspec.inspect.EnumType(cls=cls):
            return "one of " + ", ".join(str(each.value) for each in cls)
        case msgspec.inspect.LiteralType(values=values):
            return "one of " + ", ".join(map(str, values))
        case msgspec.inspect.VarTupleType(item_type=item):
            return f"list of {_form(item)}"
        case msgspec.inspect.StructType(fields=fields, tag=tag, tag_field=tag_field):
            names = [
                *([f'"{tag_field}": "{tag}"'] if tag_field else []),
                *(f'"{field.encode_name}"' for field in fields),
            ]
            return "{" + ", ".join(names) + "}"
        case _:
            return _WORDS[type(kind)]


_WORDS = {
    msgspec.inspect.StrType: "text",
    msgspec.inspect.IntType: "whole number",
    msgspec.inspect.FloatType: "number",
    msgspec.inspect.BoolType: "true or false",
    msgspec.inspect.NoneType: "null",
    msgspec.inspect.AnyType: "any JSON",
}
