"""What follows from the declaration of a variant: its JSON, its labels, what filters compare, which subjects it touches."""

from __future__ import annotations

import json
import typing
from pathlib import Path
from typing import Any, Final, NamedTuple

import msgspec
import pytest

from tidings.happenings import AnyHappening, Happening, HappeningFilter, UnknownHappening
from tidings.happenings.description import describe_variants
from tidings.happenings.errors import InvalidHappening, VariantDeclaredTwice
from tidings.happenings.happening import FreeForm, Plugin, Shelf, Subject, from_json, static_labels, to_json, variants
from tidings.happenings.variants import HealthStatus, PluginEvent

from .support import AT_MS, released

GOLDEN: Final = sorted((Path(__file__).parent / "golden").glob("*.json"))
OURS: Final = [name for name, variant in variants().items() if variant.__module__ == "tidings.happenings.variants"]

DECLARED: Final = """
custody_taken             plugin@plugin handle_id shelf@shelf custody_type
custody_released          plugin@plugin handle_id
custody_state_reported    plugin@plugin handle_id health-
relation_cardinality_violation plugin@plugin predicate source_id@subject target_id@subject side declared- observed_count
relation_forgotten        plugin@plugin source_id@subject predicate target_id@subject reason-
relation_suppressed       admin_plugin@plugin source_id@subject predicate target_id@subject reason-
relation_suppression_reason_updated admin_plugin@plugin source_id@subject predicate target_id@subject old_reason- new_reason-
relation_unsuppressed     admin_plugin@plugin source_id@subject predicate target_id@subject
subject_forgotten         plugin@plugin canonical_id@subject subject_type
factory_instance_announced plugin@plugin instance_id canonical_id@subject shelf@shelf payload_bytes
factory_instance_retracted plugin@plugin instance_id canonical_id@subject shelf@shelf
subject_addressing_forced_retract admin_plugin target_plugin@plugin canonical_id@subject scheme value reason-
relation_claim_forced_retract admin_plugin target_plugin@plugin source_id@subject predicate target_id@subject reason-
subject_merged            admin_plugin@plugin source_ids-@subject new_id@subject reason-
subject_split             admin_plugin@plugin source_id@subject new_ids-@subject strategy- reason-
relation_split_ambiguous  admin_plugin@plugin source_subject@subject predicate other_endpoint_id@subject candidate_new_ids-@subject
relation_rewritten        admin_plugin@plugin predicate old_subject_id@subject new_subject_id@subject target_id@subject
relation_cardinality_violated_post_rewrite admin_plugin@plugin subject_id@subject predicate side declared- observed_count
claim_reassigned          admin_plugin@plugin plugin kind old_subject_id@subject new_subject_id@subject scheme- value- predicate- target_id-@subject
relation_claim_suppression_collapsed admin_plugin@plugin subject_id@subject predicate target_id@subject demoted_claimant surviving_suppression_record-
flight_mode_changed       rack_class on
appointment_approaching   creator appointment_id scheduled_for_ms fires_in_ms
appointment_fired         creator appointment_id fired_at_ms dispatch_outcome
appointment_missed        creator appointment_id scheduled_for_ms reason
appointment_cancelled     creator appointment_id cancelled_by
watch_fired               creator watch_id fired_at_ms dispatch_outcome
watch_missed              creator watch_id suppressed_at_ms reason
watch_cancelled           creator watch_id cancelled_by
watch_evaluation_throttled creator watch_id dropped
subject_grammar_orphan    subject_type count first_observed_at_ms
subject_migrated          old_id@subject new_id@subject from_type to_type migration_id
grammar_migration_progress migration_id from_type completed remaining batch_index
grammar_orphans_accepted  subject_type reason
"""
"""The 33 variants that every consumer may rely on: ``-`` is no label, ``@`` says which filter compares a field. All have ``at_ms`` too."""


class Field(NamedTuple):
    """One field of the table."""

    name: str
    is_label: bool
    role: str


def field_of(word: str) -> Field:
    before, _, role = word.partition("@")
    return Field(before.rstrip("-"), not before.endswith("-"), role)


TABLE: Final = {
    line.split()[0]: [field_of(word) for word in line.split()[1:]] for line in DECLARED.strip().splitlines()
}


def examples(name: str) -> list[AnyHappening]:
    """The happenings in the golden files of a variant."""
    paths = [path for path in GOLDEN if path.name.partition(".")[0] == name]
    return [from_json(json.loads(path.read_bytes())) for path in paths]


@pytest.mark.req("H78")
@pytest.mark.parametrize("path", GOLDEN, ids=lambda path: path.stem)
def test_a_golden_file_is_what_json_has(path: Path) -> None:
    """What stands in the file is read as the variant of that name, and is written exactly so again."""
    form = json.loads(path.read_bytes())

    happening = from_json(form)

    assert isinstance(happening, variants()[path.name.partition(".")[0]])
    assert to_json(happening) == form
    assert msgspec.json.decode(msgspec.json.encode(happening)) == form


@pytest.mark.req("H78", "H16")
@pytest.mark.parametrize("name", OURS)
def test_every_variant_has_a_golden_file_and_its_time(name: str) -> None:
    """No variant is without one, and each says when it was emitted."""
    assert examples(name)
    for happening in examples(name):
        assert happening.variant == name
        assert happening.at_ms == to_json(happening)["at_ms"] == 1_767_225_600_123


@pytest.mark.req("H78")
@pytest.mark.parametrize("name", TABLE)
def test_what_consumers_rely_on_is_declared(name: str) -> None:
    """Each of the 33 variants has exactly its fields."""
    assert len(TABLE) == 33
    declared = [each.encode_name for each in msgspec.structs.fields(variants()[name])]
    assert declared == ["at_ms", *(field.name for field in TABLE[name])]


@pytest.mark.req("H19")
@pytest.mark.parametrize("name", TABLE)
def test_no_body_is_carried(name: str) -> None:
    """No field holds bytes, objects without a form or states; the one summary is the health of a custody."""
    for field in msgspec.structs.fields(variants()[name]):
        parts = {field.type, *typing.get_args(field.type)}
        assert not parts & {bytes, bytearray, dict, Any, object}, field.name
        if HealthStatus in parts:
            assert (name, field.name) == ("custody_state_reported", "health")


@pytest.mark.req("H62", "H63")
@pytest.mark.parametrize("name", TABLE)
def test_labels_are_the_plain_fields(name: str) -> None:
    """Text, numbers and truth values that are always there, as text; and ``variant``, as in JSON. Nothing else."""
    names = [field.name for field in TABLE[name] if field.is_label]
    assert static_labels(name) == ("variant", *names)
    for happening in examples(name):
        form = to_json(happening)
        texts = {each: form[each] if isinstance(form[each], str) else json.dumps(form[each]) for each in names}
        assert happening.labels() == {"variant": form["type"], **texts}


@pytest.mark.parametrize("name", TABLE)
def test_filters_compare_what_the_declaration_marks(name: str) -> None:
    """Plugin, shelf and the subjects that are touched are those of the table, and no other value, not even an empty one, is."""
    for happening in examples(name):
        form = to_json(happening)
        found: dict[str, list[str]] = {"plugin": [], "shelf": [], "subject": []}
        for field in TABLE[name]:
            if field.role and field.name in form:
                value = form[field.name]
                found[field.role] += value if isinstance(value, list) else [value]
        assert happening.filter_plugin == next(iter(found["plugin"]), None)
        assert happening.filter_shelf == next(iter(found["shelf"]), None)
        assert list(happening.subjects) == found["subject"]
        values = {value for value in form.values() if isinstance(value, str)}
        assert {value for value in values if happening.affects_subject(value)} <= set(found["subject"])
        assert all(happening.affects_subject(each) for each in found["subject"])
        assert not happening.affects_subject("")


@pytest.mark.req("H64")
@pytest.mark.parametrize(
    ("payload", "promoted"),
    [
        (
            {
                "sensor_id": "S1",
                "level": 76.2,
                "is_hot": True,
                "unit": None,
                "at": [1],
                "plugin": "forged",
                "variant": "x",
            },
            {"sensor_id": "S1", "level": "76.2", "is_hot": "true", "unit": "null", "at": "[1]"},
        ),
        ([{"sensor_id": "S1"}], {}),
        ("sensor_id", {}),
        (None, {}),
    ],
    ids=["object", "list", "text", "nothing"],
)
def test_the_keys_of_a_free_payload_are_labels(payload: Any, promoted: dict[str, str]) -> None:
    """An object lends its top-level keys, text as it is and the rest as JSON; others lend nothing. No key stands in for a declared label."""
    event = PluginEvent(at_ms=AT_MS, plugin="org.example.sensor", event_type="reading", payload=payload)

    fixed = {"variant": "plugin_event", "plugin": "org.example.sensor", "event_type": "reading"}
    assert event.labels() == {**promoted, **fixed}


def test_the_static_labels_are_those_of_the_declaration() -> None:
    """What a payload may lend is not among them, and an unknown variant has none."""
    assert static_labels("plugin_event") == ("variant", "plugin", "event_type")
    assert static_labels("not_declared") == ()


@pytest.mark.req("H15")
def test_an_unknown_variant_is_carried_as_it_came() -> None:
    """It has its name, its time, its one label and every field, filters on its variant find it, and it is written again unchanged."""
    form = {"type": "door_jammed", "at_ms": 7, "door": {"id": 3}, "plugin": "org.example.door"}

    happening = from_json(form)

    assert isinstance(happening, UnknownHappening)
    assert to_json(happening) == form
    assert (happening.variant, happening.at_ms, happening.labels()) == ("door_jammed", 7, {"variant": "door_jammed"})
    assert HappeningFilter(variants=("door_jammed",)).matches(happening)
    assert not HappeningFilter(plugins=("org.example.door",)).matches(happening)
    assert not happening.affects_subject("org.example.door")
    assert UnknownHappening("timeless", {}).at_ms == 0


@pytest.mark.req("H15")
def test_a_known_variant_of_another_version_is_refused_or_carried() -> None:
    """Fields that do not fit are an error that names them; where history is read they are carried like those of an unknown variant."""
    form = {"type": "custody_released", "at_ms": 7, "plugin": "a", "handle_id": 12}

    with pytest.raises(InvalidHappening, match=r"custody_released.*handle_id"):
        from_json(form)
    carried = from_json(form, is_strict=False)
    assert isinstance(carried, UnknownHappening)
    assert to_json(carried) == form


@pytest.mark.parametrize("form", [None, [], "x", {}, {"type": 3}, {"at_ms": 1}])
def test_what_has_no_type_is_no_happening(form: object) -> None:
    """It is refused, strict or not."""
    with pytest.raises(InvalidHappening, match="no object with a type"):
        from_json(form, is_strict=False)


@pytest.mark.req("H77")
def test_a_declaration_is_all_that_a_new_variant_takes() -> None:
    """JSON, labels, filters and subjects of a user's own variant follow from it, and so does its line in the documents."""

    class LiftStuck(Happening, frozen=True, kw_only=True):
        """A lift stopped between two floors."""

        plugin: Plugin
        shelf: Shelf
        lift_id: Subject
        floor: int
        is_full: bool
        cause: str | None
        details: FreeForm

    stuck = LiftStuck(
        at_ms=AT_MS, plugin="org.example.lift", shelf="house.lifts", lift_id="l-1", floor=3, is_full=True, cause=None, details={"door": "shut"}
    )  # fmt: skip

    assert from_json(to_json(stuck)) == stuck
    assert to_json(stuck)["type"] == "lift_stuck"
    assert static_labels("lift_stuck") == ("variant", "plugin", "shelf", "lift_id", "floor", "is_full")
    assert stuck.labels()["door"] == "shut"
    every = HappeningFilter(
        variants=("lift_stuck",), plugins=("org.example.lift",), shelves=("house.lifts",), subjects=("l-1",)
    )
    assert every.matches(stuck)
    described = next(each for each in describe_variants() if each.name == "lift_stuck")
    assert (described.text, described.plugin, described.shelf) == (
        "A lift stopped between two floors.",
        "plugin",
        "shelf",
    )
    assert [(field.name, field.form) for field in described.fields] == [
        ("plugin", "text"),
        ("shelf", "text"),
        ("lift_id", "text"),
        ("floor", "whole number"),
        ("is_full", "true or false"),
        ("cause", "text or null"),
        ("details", "any JSON"),
    ]


def test_a_name_is_declared_once() -> None:
    """A second class of a name is refused; the same class declared again, as by running its module again, is not."""

    def declare() -> type[Happening]:
        class BellRung(Happening, frozen=True, kw_only=True):
            """A bell rang."""

        return BellRung

    declare()
    again = declare()

    assert variants()["bell_rung"] is again
    with pytest.raises(VariantDeclaredTwice, match="custody_taken"):
        type("CustodyTaken", (Happening,), {})


@pytest.mark.parametrize("field", ["type", "variant", "labels", "subjects"])
def test_a_field_has_no_name_that_every_happening_has(field: str) -> None:
    """It would hide what filters and coalescing ask every happening for. The class is no variant then."""
    with pytest.raises(InvalidHappening, match=field):
        type("Hiding", (Happening,), {"__annotations__": {field: str}})

    assert "hiding" not in variants()


def test_happenings_are_values() -> None:
    """Two with the same fields are equal and have the same hash, and none can be changed."""
    assert released(1) == released(1) != released(2)
    assert hash(released(1)) == hash(released(1))
    with pytest.raises(AttributeError):
        released(1).plugin = "other"  # type: ignore[misc]
