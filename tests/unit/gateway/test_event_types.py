"""Event types are declared before they are told of, and what was declared once holds."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import tidings
from tests.unit.gateway.engines import Engines, app_event
from tidings.access.visibility import Audience
from tidings.gateway.constants import APP_EVENT_TYPES_MAX
from tidings.gateway.errors import DeclarationRefused, DescriptorRefused
from tidings.gateway.event_types import (
    FORBIDDEN_FIELDS,
    NODE_DECLARATIONS,
    EventDeclaration,
    EventDeclarations,
    app_declaration,
)
from tidings.gateway.names import check_event_name


def order_paid(name: str = "app.shop.order_paid", **changes: Any) -> EventDeclaration:
    """The declaration of one of the shop's event types."""
    given: dict[str, Any] = {"slug": "shop", "fields": ("order_id",), "optional_fields": ("note_count",)}
    return app_declaration(name, **given | changes)


@pytest.mark.req("R15")
def test_the_nodes_own_types_are_snake_case_in_every_segment_and_carry_their_class() -> None:
    """Each name keeps to the grammar, begins with its class, and its fields are among what may be told."""
    for each in NODE_DECLARATIONS:
        assert check_event_name(each.event_type) == each.event_type
        assert each.event_type.partition(".")[0] == each.event_class
        assert not (each.fields | each.optional_fields) & FORBIDDEN_FIELDS
    assert len({each.event_type for each in NODE_DECLARATIONS}) == len(NODE_DECLARATIONS)
    EventDeclarations()


def told_in_the_code() -> Iterator[tuple[str, frozenset[str]]]:
    """Each event type that a manager tells by name, with the fields that it writes down in the same call."""
    for path in Path(tidings.__file__).parent.rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        if "tell(" not in text:
            continue
        for node in ast.walk(ast.parse(text)):
            match node:
                case ast.Call(
                    func=ast.Attribute(attr="tell" | "_tell"),
                    args=[ast.Constant(value=str(name)), ast.Dict(keys=keys), *_],
                ) if name.startswith(("system.", "network.", "security.")):
                    yield name, frozenset(str(key.value) for key in keys if isinstance(key, ast.Constant))


def test_what_the_nodes_managers_tell_is_declared_as_they_tell_it() -> None:
    """Every name in the code is a declared type, and its fields are among the declared ones."""
    declared = {each.event_type: each.fields | each.optional_fields for each in NODE_DECLARATIONS}
    told = list(told_in_the_code())

    assert len({name for name, _ in told}) >= 12
    assert [(name, sorted(fields)) for name, fields in told if not fields <= declared.get(name, frozenset())] == []


def test_the_reference_has_every_type_of_the_node_with_its_fields() -> None:
    """Name, who tells it, and the fields of its summary, as they are declared."""
    page = (Path(__file__).parents[3] / "docs/reference/gateway.md").read_text(encoding="utf-8")
    rows = re.findall(
        r"^\| `((?:graph|system|network|security)\.[a-z_.]+)` \| (.*?) \| (.*?)(?:; maybe (.*?))? \|$",
        page,
        re.MULTILINE,
    )
    found = {name: tuple(frozenset(re.findall(r"`(\w+)`", cell)) for cell in cells) for name, *cells in rows}

    assert found == {each.event_type: (each.sources, each.fields, each.optional_fields) for each in NODE_DECLARATIONS}


@pytest.mark.req("R55")
@pytest.mark.parametrize(
    "name",
    [
        "app.notes.order_paid",
        "shop.order_paid",
        "graph.order_paid",
        "app.shop",
        "app.order_paid",
        "system.shop.order_paid",
    ],
)
def test_an_apps_names_begin_with_its_own_slug(name: str) -> None:
    """In another's namespace an app declares nothing."""
    with pytest.raises(DeclarationRefused):
        order_paid(name)


@pytest.mark.req("R56")
@pytest.mark.parametrize(
    "name",
    [
        "app.shop.OrderPaid",
        "app.shop.order-paid",
        "app.shop.order__paid",
        "app.shop.1st_order",
        "app.shop.order paid",
        "app.shop.paid.",
        "app.shop.v2.paid",
        "app.shop.paid.v1",
        "app.shop.paid.v02",
        "app.shop." + ".".join("abcdefg"),
        "app.shop." + "x" * 120,
        "app.shop.ördered",
        "app.shop.paid\n",
    ],
)
def test_a_name_with_a_segment_that_is_not_snake_case_is_refused(name: str) -> None:
    """2 to 8 segments of lower-case words joined by single underscores, 128 characters in all, a version only at the end."""
    with pytest.raises(DeclarationRefused):
        order_paid(name)


def test_an_app_whose_slug_is_no_segment_declares_nothing() -> None:
    """A slug may have dots and hyphens; a name cannot hold such a one."""
    for slug in ("my-shop", "my.shop", "9shop"):
        with pytest.raises(DeclarationRefused):
            order_paid(f"app.{slug}.order_paid", slug=slug)


@pytest.mark.req("R57", "R15")
@pytest.mark.parametrize(
    "changes",
    [
        {"fields": ("order_id", "total")},
        {"fields": ()},
        {"optional_fields": ()},
        {"audience": Audience.APP},
        {"scope_anchors": ("app_id",)},
        {"fields": ("order_id", "note_count"), "optional_fields": ()},
    ],
)
def test_once_declared_the_fields_of_a_type_are_settled(changes: dict[str, Any]) -> None:
    """Another list under the same name is refused, also after the app was away; the same again changes nothing."""
    declarations = EventDeclarations()
    declarations.declare(order_paid())
    with pytest.raises(DeclarationRefused):
        declarations.declare(order_paid(**changes))
    declarations.withdraw("app.shop")
    with pytest.raises(DeclarationRefused):
        declarations.declare(order_paid(**changes))
    declarations.declare(order_paid())

    assert declarations.get("app.shop.order_paid") == order_paid()


@pytest.mark.req("R53", "R54")
def test_other_fields_take_the_next_version_and_the_former_name_goes_on() -> None:
    """Both are told side by side, also when the former is marked as outdated; no call takes a name away for good."""
    engines = Engines()
    declarations = engines.declarations
    declarations.declare(order_paid())
    with pytest.raises(DeclarationRefused):
        declarations.declare(order_paid(fields=("order_id", "total")))
    declarations.declare(order_paid("app.shop.order_paid.v2", fields=("order_id", "total")))
    declarations.declare(order_paid(is_deprecated=True))

    engines.tell(app_event(1))
    engines.tell(app_event(2, event_type="app.shop.order_paid.v2", payload_summary={"order_id": "42", "total": 7}))
    assert [each.retained.envelope.event_type for each in engines.normalize()] == [
        "app.shop.order_paid",
        "app.shop.order_paid.v2",
    ]
    with pytest.raises(DescriptorRefused):
        engines.tell(app_event(3, payload_summary={"order_id": "42", "total": 7}))
    assert not any(hasattr(declarations, name) for name in ("remove", "delete", "release"))


@pytest.mark.req("R58")
def test_an_optional_field_comes_only_where_the_declaration_has_it() -> None:
    """Declared as optional from the beginning it may be there or not; one that was not needs a new version."""
    engines = Engines()
    engines.declarations.declare(order_paid())
    with_it = {"order_id": "1", "note_count": 2}

    assert engines.envelope_of(app_event(1, payload_summary=with_it)).retained.envelope.payload_summary == with_it
    assert engines.envelope_of(app_event(2)).retained.envelope.payload_summary == {"order_id": "42"}
    with pytest.raises(DescriptorRefused):
        engines.tell(app_event(3, payload_summary={"order_id": "1", "discount": 3}))
    with pytest.raises(DeclarationRefused):
        engines.declarations.declare(order_paid(optional_fields=("note_count", "discount")))
    engines.declarations.declare(order_paid("app.shop.order_paid.v2", optional_fields=("note_count", "discount")))


@pytest.mark.parametrize(
    "changes",
    [
        {"fields": ("private_key",)},
        {"fields": ("password",)},
        {"fields": ("access_token",)},
        {"optional_fields": ("body",)},
        {"fields": ("Total",)},
        {"fields": ("",)},
        {"fields": tuple(f"f{n}" for n in range(17))},
        {"fields": ("order_id", "note_count")},
        {"scope_anchors": ("app_id", "tenant")},
        {"scope_anchors": ("domain_id",)},
        {"audience": Audience.ADMINISTRATORS},
        {"is_object_scoped": True},
    ],
)
def test_a_declaration_that_breaks_a_rule_is_refused(changes: dict[str, Any]) -> None:
    """Fields for contents or secrets, fields twice, unknown anchors, none for the app, an audience that is not an app's."""
    with pytest.raises(DeclarationRefused):
        order_paid(**changes)


def test_an_app_declares_so_many_types_and_no_more() -> None:
    """The registry is bounded, and the node's own types are not an app's to declare."""
    declarations = EventDeclarations()
    for number in range(APP_EVENT_TYPES_MAX):
        declarations.declare(order_paid(f"app.shop.kind_{number}"))
    with pytest.raises(DeclarationRefused, match="all that an app may"):
        declarations.declare(order_paid())
    declarations.declare(app_declaration("app.notes.note_read", slug="notes", fields=("note_id",)))
    with pytest.raises(DeclarationRefused, match="come with the node"):
        declarations.declare(NODE_DECLARATIONS[0])


def test_the_types_of_a_channel_are_listed() -> None:
    """By name, those that may be told of now."""
    declarations = EventDeclarations()
    declarations.declare(order_paid())
    assert [each.event_type for each in declarations.of_channel("app.shop")] == ["app.shop.order_paid"]
    assert [each.event_type for each in declarations.of_channel("graph")] == [
        "graph.acl_changed",
        "graph.object_mutated",
        "graph.rating_changed",
    ]

    declarations.withdraw("app.shop")
    assert declarations.of_channel("app.shop") == []
    assert declarations.get("graph.object_mutated") is not None
