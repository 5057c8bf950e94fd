"""The documents about the log are true: their tables are the code's, their links lead somewhere (programs: test_programs)."""

from __future__ import annotations

import ast
import functools
import importlib
import inspect
import pickle
import pkgutil
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

import msgspec.inspect
import pytest

from tidings.access.guard import GuardSettings
from tidings.access.resources import Action
from tidings.access.settings import AccessSettings, TokenSettings
from tidings.core.errors import InvalidEvent, TidingsError
from tidings.gateway.errors import ProtocolCode
from tidings.ledger import LedgerSettings
from tidings.ledger.errors import ErrorClass
from tidings.log import LogSettings, TopicRetention
from tidings.log.segment import is_whole
from tidings.pipeline.schemas import CORE_TABLES, TableSpec, columns_of
from tidings.pipeline.settings import PipelineSettings
from tidings.schedule.settings import ScheduleSettings
from tidings.schedule.watches import WatchSettings
from tidings.server.group_settings import GroupsSettings
from tidings.server.settings import ApiSettings
from tidings.steward.settings import StewardSettings
from tidings.sync.settings import ClientSettings, SyncSettings, TreeTarget
from tidings.wire.events import ErrorInfo
from tidings.wire.gateway import CloseReason
from tidings.wire.sync_frames import ItemError
from tools.reference import PAGES as GENERATED

REPOSITORY: Final = Path(__file__).parents[2]
SOURCES: Final = REPOSITORY / "src" / "tidings"
DOCS: Final = REPOSITORY / "docs"
PAGES: Final = sorted([*REPOSITORY.glob("*.md"), *DOCS.rglob("*.md"), REPOSITORY / "examples/README.md"])
PACKAGES: Final = sorted(path.parent.name for path in SOURCES.glob("*/__init__.py"))
RECORDS: Final = sorted((DOCS / "adr").glob("*.md"))
UNITS: Final = {
    "buffer_count_max": "commands",
    "history_count_max": "seqs",
    "batch_count_max": "commands",
    "waiting_count_max": "commands",
    "_records_max": "records",
    "_s": "seconds",
    "_s_max": "seconds",
    "_ms": "milliseconds",
    "_bytes": "bytes",
    "_bytes_max": "bytes",
    "_lines_max": "lines",
    "_count_max": "files",
    "_depth_max": "levels",
    "_days_max": "days",
}
SAMPLES: Final[dict[str, Any]] = {
    "str": "a {name}",
    "str | None": "a {name}",
    "int": 7,
    "int | None": 7,
    "float": 2.5,
    "bool": True,
    "object": object(),
    "Path": Path("a"),
    "Path | str": Path("a"),
    "tuple[str, ...]": ("a", "b"),
    "Iterable[str]": ("a", "b"),
    "dict[tuple[str, str], int]": {("a", "b"): 7},
    "dict[str, Any]": {"a": 7},
    "dict[str, object] | None": {"a": 7},
    "CloseReason": CloseReason.QUEUE_FULL,
    "ProtocolCode": ProtocolCode.INVALID_TYPE,
    "Exception": ValueError("a"),
    "BaseException": ValueError("a"),
    "Action": Action.READ,
    "Resource": "a",
    "ErrorClass": ErrorClass.TRANSIENT,
    "ErrorInfo": ErrorInfo(code="a.b", detail="a", hint="b", retryable=True),
    "Sequence[ItemError]": [ItemError(field="a", message="b")],
}
"""A value for each type that an error has."""


def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def blocks(path: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```$", text_of(path), re.DOTALL | re.MULTILINE)


def rows(text: str) -> list[list[str]]:
    """The cells of every table row whose first cell is code, without the backticks of that cell."""
    lines = (line.strip("| ").split(" | ") for line in text.replace("| |", "|  |").splitlines() if line.startswith("|"))
    return [[cell.strip(" |") for cell in cells] for cells in lines if cells[0].startswith("`")]


@pytest.mark.parametrize("name", sorted(GENERATED.keys() - {"cli.md"}))
def test_a_page_that_follows_from_the_code_is_current(name: str) -> None:
    """The page is what the code says now; ``python -m tools.reference`` renews it. That of the tool has its own test."""
    assert text_of(DOCS / "reference" / name) == GENERATED[name]()


# Settings


def range_of(kind: msgspec.inspect.Type) -> str:
    """The range column of a setting of this type."""
    match kind:
        case msgspec.inspect.UnionType(types=types):
            return range_of(next(each for each in types if not isinstance(each, msgspec.inspect.NoneType)))
        case msgspec.inspect.LiteralType(values=values):
            return ", ".join(f"`{value}`" for value in sorted(map(str, values)))
        case msgspec.inspect.BoolType():
            return "`false`, `true`"
        case msgspec.inspect.DictType():
            return "rules by topic"
        case msgspec.inspect.IntType() | msgspec.inspect.FloatType():
            if kind.gt is not None:
                return f"more than {kind.gt:_}"
            return f"at least {kind.ge:_}" if kind.le is None else f"{kind.ge:_} to {kind.le:_}"
    raise AssertionError(f"no words for the range of a {type(kind).__name__}")


def default_of(value: object) -> str:
    match value:
        case None:
            return "none"
        case bool():
            return f"`{str(value).lower()}`"
        case int():
            return f"`{value:_}`"
    return f"`{value}`"


def unit_of(name: str) -> str:
    return next((unit for ending, unit in UNITS.items() if name.endswith(ending)), "")


@pytest.mark.parametrize(
    "settings", [LogSettings, TopicRetention, LedgerSettings], ids=lambda settings: settings.__name__
)
def test_the_settings_page_has_every_setting_as_it_is(settings: type[msgspec.Struct]) -> None:
    """Name, default, range and unit of every setting stand in the page, in the code's order, each with its effect."""
    section = text_of(DOCS / "reference/settings.md").split(f"## {settings.__name__}\n")[1].split("\n## ")[0]
    described = msgspec.inspect.type_info(settings)
    assert isinstance(described, msgspec.inspect.StructType)
    values: Any = settings()

    found = rows(section)

    assert [row[:4] for row in found] == [
        [f"`{field.name}`", default_of(getattr(values, field.name)), range_of(field.type), unit_of(field.name)]
        for field in described.fields
    ]
    assert all(row[4].endswith(".") for row in found)


@pytest.mark.parametrize(
    ("page", "settings"),
    [
        *(("settings", each) for each in (AccessSettings, TokenSettings, ClientSettings, SyncSettings, TreeTarget)),
        *(
            ("settings", each)
            for each in (ApiSettings, GroupsSettings, PipelineSettings, ScheduleSettings, WatchSettings)
        ),
        *(("node-settings", each) for each in (GuardSettings, StewardSettings)),
    ],
)
def test_a_settings_table_has_every_setting_with_its_default(page: str, settings: type[msgspec.Struct]) -> None:
    """The table of a part's settings names each of them in the code's order; a default that is a number or a switch is right."""
    section = text_of(DOCS / f"reference/{page}.md").split(f"## {settings.__name__}\n")[1].split("\n## ")[0]
    values: Any = settings()

    found = rows(section)

    assert [row[0] for row in found] == [f"`{name}`" for name in settings.__struct_fields__]
    for row in found:
        value = getattr(values, row[0].strip("`"))
        if isinstance(value, int | float):
            assert float(ast.literal_eval(row[1].strip("`").capitalize())) == value, row


# Tables


@pytest.mark.parametrize("table", CORE_TABLES, ids=lambda table: table.name)
def test_the_page_of_tables_has_every_column(table: TableSpec) -> None:
    """Each table that every log has stands in the page with what a row is, its columns in order, and their types."""
    section = text_of(DOCS / "reference/tables.md").split(f"## {table.name}\n")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (\w+) \| (\S+) \| \S", section, re.MULTILINE)

    assert table.about.rstrip(".") in section
    if table.name == "silver.events":
        assert "The columns of `bronze.events`." in section
    else:
        assert [each for each in listed if each != ("column", "type")] == columns_of(table.schema)


# Errors


def subclasses(kind: type[TidingsError]) -> Iterator[type[TidingsError]]:
    yield kind
    for each in kind.__subclasses__():
        yield from subclasses(each)


def errors_in(package: str) -> list[type[TidingsError]]:
    """Every error that a package of ours defines, by name."""
    name = f"tidings.{package}"
    for module in pkgutil.walk_packages([str(SOURCES / package)], f"{name}."):
        if not module.name.endswith("__main__"):
            importlib.import_module(module.name)
    found = {each for each in subclasses(TidingsError) if each.__module__.startswith(f"{name}.")}
    found = {each for each in found if not each.__name__.startswith("_")}  # never raised to a caller by that name
    return sorted(found, key=lambda each: each.__name__)


def parameters_of(kind: type[TidingsError]) -> dict[str, str]:
    """The parameters that an error is made with, by name, and the type of each as it is written in the code."""
    if kind.__init__ is not TidingsError.__init__:
        return {name: str(each.annotation) for name, each in inspect.signature(kind).parameters.items()}
    declared = [inspect.get_annotations(each) for each in reversed(kind.__mro__) if each not in TidingsError.__mro__]
    return {name: str(type_) for each in declared for name, type_ in each.items() if not type_.startswith("ClassVar")}


@pytest.mark.parametrize("package", PACKAGES)
def test_the_errors_page_has_every_error_as_it_is(package: str) -> None:
    """Name, code and whether to try again stand in the page for every error of a package."""
    found = {row[0]: row[1:3] for row in rows(text_of(DOCS / "reference/errors.md"))}
    defined = {
        f"`{each.__name__}`": [f"`{each.code}`", "yes" if each.retryable else "no"] for each in errors_in(package)
    }

    assert {name: found.get(name) for name in defined} == defined


@pytest.mark.parametrize("package", PACKAGES)
def test_the_text_of_every_error_has_its_hint(package: str) -> None:
    """``str(error)`` is a sentence and the hint for every error, made from its values, and the same for a pickled one."""
    for kind in errors_in(package):
        error = kind(**{name: SAMPLES[type_name] for name, type_name in parameters_of(kind).items()})
        copied = pickle.loads(pickle.dumps(error))

        assert str(error) == (error.describe() if error.hint is None else f"{error.describe()} (hint: {error.hint})")
        assert error.describe() or kind.__subclasses__(), f"{kind.__name__} has no sentence"
        assert (str(copied), repr(copied), vars(copied).keys()) == (str(error), repr(error), vars(error).keys())


@pytest.mark.parametrize(
    ("values", "named"),
    [(("a",), {}), (("a", "b", "c", "d"), {}), (("a", "b"), {"field": "c"}), (("a", "b"), {"d": 1})],
)
def test_an_error_is_made_from_its_own_values_only(values: tuple[str, ...], named: dict[str, object]) -> None:
    """A value that is missing, given twice or unknown is refused; a default, or a value by name, is not."""
    error = InvalidEvent("payload", problem="is no object", hint="publish a mapping")
    assert str(error) == "payload: is no object (hint: publish a mapping)"
    assert (error.describe(), error.args) == ("payload: is no object", ("payload", "is no object"))
    assert str(InvalidEvent("payload", "is no object")) == "payload: is no object"

    kind: Any = InvalidEvent
    with pytest.raises(TypeError, match="InvalidEvent takes"):
        kind(*values, **named)


def test_the_errors_page_has_no_other_errors() -> None:
    """The page lists each error once, with its own code and its meaning, and none that is not in the code."""
    found = rows(text_of(DOCS / "reference/errors.md"))
    code = "".join(text_of(path) for path in SOURCES.rglob("*.py"))

    assert [row[0] for row in found if f"\nclass {row[0].strip('`')}(" not in code] == []
    assert len({row[0] for row in found}) == len({row[1] for row in found}) == len(found)
    # The codes of who may not connect to the gateway are those of its protocol.
    assert [
        row[1] for row in found if not re.fullmatch(r"`([a-z]+\.[a-z_]+|ERR_[A-Z_]+|[a-z]+_[a-z_]+)`", row[1])
    ] == []
    assert all(len(row) == 5 and row[3].endswith(".") for row in found)


def test_the_format_page_shows_real_lines() -> None:
    """Each line that the format page shows in full passes its own checksum."""
    shown = [line for block in blocks(DOCS / "internals/format.md", "") for line in block.splitlines()]
    whole = [line for line in shown if line.startswith('{"crc":') and "..." not in line and "<" not in line]

    assert len(whole) >= 5
    assert [line for line in whole if not is_whole(line.encode())] == []


# Map, decisions, links


def test_the_map_has_every_module() -> None:
    """Each module stands in the map of ARCHITECTURE.md, itself or by its folder; those of core and log by themselves."""
    first_cells = re.findall(r"^\| (.+?) \|", text_of(REPOSITORY / "ARCHITECTURE.md"), re.MULTILINE)
    named = {name for cell in first_cells for name in re.findall(r"`([^`]+)`", cell)}
    modules = {path.relative_to(SOURCES) for path in SOURCES.rglob("*.py") if path.name != "__init__.py"}

    by_themselves = {str(module) for module in modules if module.parts[0] in ("core", "log")}
    folders = {f"{module.parts[0]}/" for module in modules if len(module.parts) > 1}
    at_the_top = {str(module) for module in modules if len(module.parts) == 1}
    assert sorted((by_themselves | folders | at_the_top) - named) == []
    assert sorted(name for name in named if "/" in name and not (SOURCES / name).exists()) == []


def test_the_way_of_an_event_names_real_files() -> None:
    """ARCHITECTURE.md opens with one paragraph, and every file that it names exists."""
    opening = text_of(REPOSITORY / "ARCHITECTURE.md").split("\n## ")[0].split("\n\n")[1:]
    files = set(re.findall(r"`(log/[a-z_/]+\.py)`", opening[0]))

    assert [part for part in opening[1:] if part.strip()] == []
    assert len(files) >= 15
    assert sorted(file for file in files if not (SOURCES / file).exists()) == []


def test_every_decision_is_listed() -> None:
    """Decisions are numbered without holes, and ARCHITECTURE.md lists each of them once."""
    listed = re.findall(r"^- \[(\d{4})\]\(docs/adr/(.+?)\)", text_of(REPOSITORY / "ARCHITECTURE.md"), re.MULTILINE)

    assert [int(path.name[:4]) for path in RECORDS] == list(range(1, len(RECORDS) + 1))
    assert listed == [(path.name[:4], path.name) for path in RECORDS]


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.name[:4])
def test_a_decision_has_its_parts(path: Path) -> None:
    """A decision has its number, date, status, context, decision and consequences."""
    text = text_of(path)

    assert text.startswith(f"# {path.name[:4]}: ")
    assert re.search(r"^Date: \d{4}-\d{2}-\d{2}$", text, re.MULTILINE)
    assert re.search(r"^Status: (proposed|accepted|replaced by \d{4})$", text, re.MULTILINE)
    places = [text.find(f"\n## {part}\n") for part in ("Context", "Decision", "Consequences")]
    assert places == sorted(places)
    assert -1 not in places


@functools.cache
def anchors(path: Path) -> set[str]:
    """The anchors of a page's headings, as a forge makes them."""
    headings = re.findall(
        r"^#+ (.+)$", re.sub(r"^```.*?^```$", "", text_of(path), flags=re.DOTALL | re.M), re.MULTILINE
    )
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_every_link_leads_somewhere(path: Path) -> None:
    """A link to another page, or to a heading, finds it."""
    prose = re.sub(r"^```.*?^```$|`[^`\n]+`", "", text_of(path), flags=re.DOTALL | re.MULTILINE)
    for link in re.findall(r"\]\(([^)\s]+)\)", prose):
        if link.startswith("https://"):
            continue
        file, _, anchor = link.partition("#")
        target = (path.parent / file).resolve() if file else path
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_the_first_page_leads_to_every_page() -> None:
    """The first page lists every page but the decisions once, so that the site's navigation, made from it, has them all."""
    listed = re.findall(r"^- \[.+?\]\((.+?)\)", text_of(DOCS / "index.md"), re.MULTILINE)
    pages = [path for path in PAGES if path.parent.name != "adr" and path != DOCS / "index.md"]

    assert sorted((DOCS / file).resolve() for file in listed) == pages


def test_every_guarantee_names_a_test_that_is_there() -> None:
    """Each line of the guarantees is a sentence and one test, which its file has and which is not heavy."""
    lines = [line for line in text_of(DOCS / "guarantees.md").splitlines() if line.startswith("| ")]
    found = [re.fullmatch(r"\| (.+\.) \| `(tests/\S+\.py)::(test_\w+)` \|", line) for line in lines]

    assert {line for line, each in zip(lines, found, strict=True) if each is None} == {"| what holds | shown by |"}
    for each in filter(None, found):
        before, name, _ = text_of(REPOSITORY / each[2]).partition(f"def {each[3]}(")
        assert name, each[3]
        assert "@pytest.mark.heavy\n" not in before.rpartition("\n\n\n")[2], each[3]
