"""Filters: any value within a dimension, all dimensions that are set; and the index that finds who wants a happening."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.happenings import AnyHappening, Envelope, HappeningFilter, UnknownHappening
from tidings.happenings.errors import InvalidHappeningFilter
from tidings.happenings.filter_index import FilterIndex
from tidings.happenings.filters import filter_from_json
from tidings.happenings.variants import FactoryInstanceRetracted, FlightModeChanged, RelationRewritten

from .support import AT_MS, released, taken


@pytest.mark.req("H57")
@pytest.mark.parametrize(
    ("filter", "is_let_through"),
    [
        (HappeningFilter(), True),
        (HappeningFilter(variants=("custody_taken",)), True),
        (HappeningFilter(variants=("custody_released", "custody_taken")), True),
        (HappeningFilter(variants=("custody_released",)), False),
        (HappeningFilter(variants=("not_declared_anywhere",)), False),
        (HappeningFilter(plugins=("a", "b")), True),
        (HappeningFilter(plugins=("b",)), False),
        (HappeningFilter(shelves=("s", "t")), True),
        (HappeningFilter(shelves=("S",)), False),
        (HappeningFilter(subjects=("a",)), False),
        (HappeningFilter(variants=("custody_taken",), plugins=("a",), shelves=("s",)), True),
        (HappeningFilter(variants=("custody_taken",), plugins=("a",), shelves=("t",)), False),
        (HappeningFilter(variants=("custody_released",), plugins=("a",), shelves=("s",)), False),
        (HappeningFilter(variants=("custody_taken",), plugins=("b",), shelves=("s",)), False),
    ],
)
def test_within_a_dimension_any_and_across_all(filter: HappeningFilter, is_let_through: bool) -> None:
    """A custody taken by plugin a on shelf s passes exactly the filters whose every dimension names it, if it names anything."""
    assert filter.matches(taken(1, "a", "s")) is is_let_through


@pytest.mark.req("H57")
def test_what_lacks_the_attribute_does_not_pass() -> None:
    """A release has no shelf, and flight mode no plugin: a filter on those rejects them, whatever it names."""
    flight = FlightModeChanged(at_ms=AT_MS, rack_class="flight_mode.wifi", on=True)

    assert not HappeningFilter(shelves=("audio.playback",)).matches(released(1))
    assert not HappeningFilter(plugins=("", "flight_mode.wifi")).matches(flight)
    assert HappeningFilter(variants=("flight_mode_changed",)).matches(flight)


@pytest.mark.req("H59")
@pytest.mark.parametrize(
    ("form", "message"),
    [
        ({"variant": ["custody_taken"]}, r"filter: Object contains unknown field `variant`"),
        ({"variants": "custody_taken"}, r"filter\.variants: Expected `array`, got `str`"),
        ({"plugins": ["a", 3]}, r"filter\.plugins\[1\]: Expected `str`, got `int`"),
        ({"shelves": None}, r"filter\.shelves: Expected `array`, got `null`"),
        ({"subjects": ["x"] * 10_001}, r"filter\.subjects: Expected `array` of length <= 10000"),
        (["custody_taken"], r"filter: Expected `object`, got `array`"),
        (None, r"filter: Expected `object`, got `null`"),
    ],
)
def test_a_malformed_filter_is_told_what_is_wrong(form: object, message: str) -> None:
    """A dimension that there is not, or anything but a list of names, is refused with the place and the problem."""
    with pytest.raises(InvalidHappeningFilter, match=message):
        filter_from_json(form)


@pytest.mark.req("H59")
def test_one_name_is_no_list_of_names() -> None:
    """Text in the place of a list is refused, and not taken for its letters."""
    with pytest.raises(InvalidHappeningFilter, match=r"filter\.plugins: a list of names"):
        HappeningFilter(plugins="org.example.player")  # type: ignore[arg-type]


def test_a_filter_is_read_from_json() -> None:
    """Every dimension may be left out; none at all lets everything through."""
    assert filter_from_json({}).is_empty
    assert filter_from_json({"plugins": ["a", "a"], "shelves": []}) == HappeningFilter(plugins=("a", "a"))


NAMES = st.sampled_from(["a", "b", "c"])
FILTERS = st.builds(
    HappeningFilter,
    variants=st.lists(st.sampled_from(["custody_taken", "custody_released", "mystery"]), max_size=2).map(tuple),
    plugins=st.lists(NAMES, max_size=2).map(tuple),
    shelves=st.lists(NAMES, max_size=2).map(tuple),
    subjects=st.lists(NAMES, max_size=2).map(tuple),
)
HAPPENINGS: st.SearchStrategy[AnyHappening] = st.one_of(
    st.builds(taken, st.just(1), NAMES, NAMES),
    st.builds(released, st.just(1), NAMES),
    st.builds(lambda: UnknownHappening("mystery", {"plugin": "a"})),
    st.builds(
        FactoryInstanceRetracted,
        at_ms=st.just(AT_MS), plugin=NAMES, instance_id=NAMES, canonical_id=NAMES, shelf=NAMES,
    ),
    st.builds(
        RelationRewritten,
        at_ms=st.just(AT_MS), admin_plugin=NAMES, predicate=NAMES, old_subject_id=NAMES, new_subject_id=NAMES, target_id=NAMES,
    ),
)  # fmt: skip


@given(filters=st.lists(FILTERS, max_size=12), leaving=st.sets(st.integers(0, 11)), happenings=st.lists(HAPPENINGS))
def test_the_index_finds_exactly_who_matches(
    filters: list[HappeningFilter], leaving: set[int], happenings: list[AnyHappening]
) -> None:
    """Whoever came and left, in any order, a happening finds those present whose filter lets it through, each once."""
    index: FilterIndex[int] = FilterIndex()
    numbers = {place: index.add(filter, place) for place, filter in enumerate(filters)}
    for place in leaving & numbers.keys():
        index.remove(numbers.pop(place))
    for place in list(leaving)[: len(filters)]:  # some come back, in places that became free
        if place < len(filters) and place not in numbers and place % 2:
            numbers[place] = index.add(filters[place], place)

    for happening in happenings:
        expected = sorted(place for place in numbers if filters[place].matches(happening))
        assert sorted(index.matching(happening)) == expected
    envelopes = [Envelope(seq, happening) for seq, happening in enumerate(happenings)]
    batches = [(place, list(accepted)) for place, accepted in index.matching_batches(envelopes)]
    assert len(batches) == len(dict(batches))
    assert dict(batches) == {
        place: accepted
        for place in numbers
        if (accepted := [envelope for envelope in envelopes if filters[place].matches(envelope.happening)])
    }
    for number in numbers.values():
        index.remove(number)
    assert not index
