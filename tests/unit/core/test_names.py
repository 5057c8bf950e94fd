"""Names are what no file system, shell or terminal can misread; everything else is refused by its field."""

from __future__ import annotations

import enum
import itertools
import unicodedata
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tidings.core import names
from tidings.core.errors import InvalidName
from tidings.core.events import EventType

PATH_CHECKS: list[tuple[Callable[[object], str], str]] = [
    (names.check_topic, "meta.topic"),
    (names.check_group, "group"),
    (names.check_type, "meta.type"),
]
TEXT_CHECKS: list[tuple[Callable[[object], str], str, int]] = [
    (names.check_space, "meta.space_id", 128),
    (names.check_event_id, "meta.event_id", 256),
    (names.check_idem_key, "meta.idem_key", 256),
]
SAFE = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789_-@:.")


class _Own(str, enum.Enum):  # noqa: UP042 - the kind of enum whose str() is not its value
    PLAIN = "plain.name"


@pytest.mark.req("F13", "F18")
@pytest.mark.parametrize(("check", "field"), PATH_CHECKS, ids=[field for _, field in PATH_CHECKS])
@pytest.mark.parametrize(
    "name", ["a", "7", "a-b", "a_b.c-d", "USER_CREATED@1.0", "personal:alice", "x" * 128, "a.b.c.d"]
)
def test_sound_names_pass_unchanged(check: Callable[[object], str], field: str, name: str) -> None:
    """What the grammar allows comes back as it is."""
    assert check(name) == name


@pytest.mark.req("F13", "F18")
@pytest.mark.parametrize(("check", "field"), PATH_CHECKS, ids=[field for _, field in PATH_CHECKS])
@pytest.mark.parametrize(
    "name",
    [
        *["", ".", "..", ".a", "a.", "a..b", "a/b", "a\\b", "a b", "a\n", "\x00", "é", "a__b", "a_", "a__", "_", "-a"],
        *["x" * 129, "~", "$HOME", "a;b", "a*", "%2e", None, 7, b"a", ["a"]],
    ],
    ids=ascii,
)
def test_unsound_names_are_refused_by_field(check: Callable[[object], str], field: str, name: object) -> None:
    """What the grammar does not allow is refused with the field's name, and shown in safe characters."""
    with pytest.raises(InvalidName) as caught:
        check(name)

    assert caught.value.field == field
    assert str(caught.value).isascii()
    assert str(caught.value).isprintable()


@given(st.text(max_size=140))
def test_whatever_passes_is_safe_as_a_file_name(text: str) -> None:
    """No text at all gets through that has a character, a beginning or an end that a path could trip over."""
    try:
        name = names.check_topic(text)
    except InvalidName:
        return
    assert name == text
    assert set(name) <= SAFE
    assert name[0] not in ".-"
    assert name[-1] not in "._"
    assert ".." not in name


def test_topic_and_group_can_be_told_apart_again() -> None:
    """No two pairs of topic and group share a file name."""
    words = ["".join(word) for length in (1, 2, 3) for word in itertools.product("a_", repeat=length)]
    sound = []
    for word in words:
        try:
            sound.append(names.check_topic(word))
        except InvalidName:
            continue
    pairs = list(itertools.product(sound, sound))

    assert len(sound) > 3
    assert len({f"{topic}__{group}" for topic, group in pairs}) == len(pairs)


@pytest.mark.parametrize("member", [_Own.PLAIN, EventType.HIPPO_ENCODE])
def test_a_member_of_a_string_enum_is_its_value(member: str) -> None:
    """An enum member becomes the plain string it stands for, whatever its class prints."""
    name = names.check_topic(member)

    assert type(name) is str
    assert name == member


@pytest.mark.req("F13")
@pytest.mark.parametrize(("check", "field", "bytes_max"), TEXT_CHECKS, ids=[field for _, field, _ in TEXT_CHECKS])
def test_texts_are_bounded_in_bytes(check: Callable[[object], str], field: str, bytes_max: int) -> None:
    """A text may be as long as its bound in UTF-8, and not a byte longer."""
    assert check("x" * bytes_max) == "x" * bytes_max
    assert check("ü" * (bytes_max // 2)) == "ü" * (bytes_max // 2)
    for long in ("x" * (bytes_max + 1), "ü" * (bytes_max // 2) + "x"):
        with pytest.raises(InvalidName) as caught:
            check(long)
        assert caught.value.field == field
        assert str(bytes_max) in caught.value.problem


@pytest.mark.req("F7", "F13")
@pytest.mark.parametrize(("check", "field", "bytes_max"), TEXT_CHECKS, ids=[field for _, field, _ in TEXT_CHECKS])
@pytest.mark.parametrize("text", ["", "\x00", "a\n", "\x7f", "\x9f", "\u2028", "\ud800", None, 7, b"a", []], ids=ascii)
def test_texts_are_clean(check: Callable[[object], str], field: str, bytes_max: int, text: object) -> None:
    """Empty texts, control characters, lone surrogates and what is no text are refused."""
    with pytest.raises(InvalidName) as caught:
        check(text)

    assert caught.value.field == field


def test_a_long_value_is_not_repeated_in_full() -> None:
    """An error about a huge value stays a sentence."""
    with pytest.raises(InvalidName) as caught:
        names.check_space(["x" * 1_000_000])

    assert len(str(caught.value)) < 200


def test_partitions_are_stored_in_one_way() -> None:
    """Without repeats, in NFC, in the order of their UTF-8 bytes."""
    decomposed = unicodedata.normalize("NFD", "ä")

    assert names.check_partitions(["b", "ä", "a", decomposed, "b", "Z", "\U0001f4e8", "\uffee"]) == (
        "Z",
        "a",
        "b",
        "ä",
        "\uffee",
        "\U0001f4e8",
    )
    assert names.check_partitions([]) == ()


@given(st.lists(st.text(min_size=1, max_size=20), max_size=10))
def test_checking_partitions_twice_changes_nothing(partitions: list[str]) -> None:
    """What was checked once is in its final form, in whatever order it came."""
    try:
        checked = names.check_partitions(partitions)
    except InvalidName:
        return
    assert names.check_partitions(checked) == checked
    assert names.check_partitions(reversed(partitions)) == checked


@pytest.mark.parametrize(
    "partitions", ["one", b"one", 7, None, [""], [None], ["x" * 129], [f"{n}" for n in range(65)]], ids=ascii
)
def test_unsound_partitions_are_refused(partitions: object) -> None:
    """One string for a list, what is no list, unclean names and too many of them."""
    with pytest.raises(InvalidName) as caught:
        names.check_partitions(partitions)  # type: ignore[arg-type]

    assert caught.value.field == "meta.partitions"


def test_a_name_that_grows_in_nfc_is_measured_as_stored() -> None:
    """Normalising can make a name longer; it is the stored form that must fit."""
    grows = "\U0001d15e"  # two characters in NFC, of twice the bytes
    assert len(unicodedata.normalize("NFC", grows).encode()) == 2 * len(grows.encode())

    assert names.check_partitions([grows * 16])
    with pytest.raises(InvalidName):
        names.check_partitions([grows * 17])


def test_objects_are_stored_in_one_way() -> None:
    """Type and id, without repeats, in NFC, in the order of their UTF-8 bytes; the id may be any text, colons and blanks included."""
    given = ["order:2", "a.b-c_d:x:y z", "order:2", "note:\u0061\u0308"]

    assert names.check_objects(given) == ("a.b-c_d:x:y z", "note:\u00e4", "order:2")
    assert names.check_objects([]) == ()


@pytest.mark.parametrize(
    "objects",
    ["o:1", b"o:1", 7, ["o"], ["o:"], [":1"], ["O:1"], ["o p:1"], ["o:\n"], [None], [f"o:{'x' * 255}"], [f"o:{n}" for n in range(1001)]],
    ids=lambda given: ascii(given)[:20],
)  # fmt: skip
def test_unsound_objects_are_refused(objects: object) -> None:
    """One string for a list, what has no type or no id, unclean names and too many of them."""
    with pytest.raises(InvalidName) as caught:
        names.check_objects(objects)  # type: ignore[arg-type]

    assert caught.value.field == "meta.objects"


@pytest.mark.parametrize("app", ["", "Shop", "-shop", "shop/2", "s" * 65, "sh\u00f6p", "shop\n", None, 7], ids=ascii)
def test_unsound_apps_are_refused(app: object) -> None:
    """An app is a slug of up to 64 characters."""
    with pytest.raises(InvalidName):
        names.check_app("meta.app", app)

    assert names.check_app("meta.app", "shop-2.eu_1") == "shop-2.eu_1"
