"""The conformance page says what the tests' marks say, and refuses to be made from marks that lie."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from pathlib import Path

import pytest

from tools.conformance import main, parse_requirements

REPOSITORY = Path(__file__).parents[2]
REQUIREMENTS = """
[F]
title = "First"
about = "What comes first."

[F.ids]
F1 = "One holds."
F2 = "Either | or."
F3 = "Nobody showed this."
"""


def make_tree(root: Path, tests: Mapping[str, str]) -> Path:
    """A repository with three requirements and the given test files."""
    (root / "docs").mkdir()
    (root / "docs/requirements.toml").write_text(REQUIREMENTS)
    for name, text in tests.items():
        path = root / "tests" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("import pytest\n" + textwrap.dedent(text))
    return root


def run(root: Path, *options: str) -> int:
    return main(["--root", str(root), *options])


def rows(root: Path) -> dict[str, list[str]]:
    """Id to the tests listed for it, read back from the page that was written."""
    page = (root / "docs/conformance.md").read_text()
    cells = [
        line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| F") and "](#" not in line
    ]
    return {row[0]: [] if row[-1] == "open" else row[-1].replace("`", "").split("<br>") for row in cells}


MARKED = {
    "on a function": """
        @pytest.mark.req("F1")
        def test_it() -> None: ...
        """,
    "on an async function": """
        @pytest.mark.req("F1")
        async def test_it() -> None: ...
        """,
    "among several ids": """
        @pytest.mark.req("F1", "F2")
        def test_it() -> None: ...
        """,
    "as the module's one mark": """
        pytestmark = pytest.mark.req("F1")
        def test_it() -> None: ...
        """,
    "in the module's list of marks": """
        pytestmark: list[object] = [pytest.mark.slow, pytest.mark.req("F1")]
        def test_it() -> None: ...
        """,
    "in a parameter's marks": """
        @pytest.mark.parametrize("n", [1, pytest.param(2, marks=[pytest.mark.req("F1")])])
        def test_it(n: int) -> None: ...
        """,
    "in a parameter of a named list": """
        CASES = [pytest.param(2, marks=pytest.mark.req("F1"))]
        @pytest.mark.parametrize("n", CASES)
        def test_it(n: int) -> None: ...
        """,
    "by the short name": """
        from pytest import mark
        @mark.req("F1")
        def test_it() -> None: ...
        """,
    "inside a condition": """
        if True:
            @pytest.mark.req("F1")
            def test_it() -> None: ...
        """,
}


@pytest.mark.parametrize("text", MARKED.values(), ids=MARKED.keys())
def test_a_mark_on_a_test_is_found(tmp_path: Path, text: str) -> None:
    """Wherever pytest lets a test be marked, the page lists that test for the requirement."""
    root = make_tree(tmp_path, {"unit/test_a.py": text})

    assert run(root) == 0
    assert rows(root)["F1"] == ["tests/unit/test_a.py::test_it"]


def test_marks_of_a_class_reach_its_tests_only(tmp_path: Path) -> None:
    """A class's decorator and its pytestmark count for each of its tests, and for no test beside it."""
    root = make_tree(
        tmp_path,
        {
            "test_a.py": """
            @pytest.mark.req("F1")
            class TestIt:
                pytestmark = [pytest.mark.req("F2")]
                def test_one(self) -> None: ...
                async def test_two(self) -> None: ...
                def helper(self) -> None: ...
            def test_beside() -> None: ...
            """
        },
    )

    assert run(root) == 0
    both = ["tests/test_a.py::TestIt::test_one", "tests/test_a.py::TestIt::test_two"]
    assert rows(root) == {"F1": both, "F2": both, "F3": []}


def test_a_suite_counts_when_a_test_class_inherits_it(tmp_path: Path) -> None:
    """Marks in a suite outside the collected files count once a collected test class derives from it."""
    suite = """
        class EngineSuite:
            @pytest.mark.req("F1")
            async def test_it(self) -> None: ...
        """
    user = """
        from .suite import EngineSuite
        @pytest.mark.req("F2")
        class TestMemory(EngineSuite): ...
        """
    root = make_tree(tmp_path, {"suite.py": suite})
    assert run(root) == 1

    (root / "tests/test_memory.py").write_text("import pytest\n" + textwrap.dedent(user))

    assert run(root) == 0
    assert rows(root)["F1"] == ["tests/suite.py::EngineSuite::test_it"]
    assert rows(root)["F2"] == ["tests/test_memory.py::TestMemory"]


def test_a_state_machine_counts_by_its_test_case(tmp_path: Path) -> None:
    """A marked Hypothesis machine is listed under the name by which pytest runs it."""
    text = """
        @pytest.mark.req("F1")
        class Machine: ...
        TestMachine = Machine.TestCase
        """
    root = make_tree(tmp_path, {"test_a.py": text})

    assert run(root) == 0
    assert rows(root)["F1"] == ["tests/test_a.py::TestMachine"]


REFUSED = {
    "an unknown id": ('@pytest.mark.req("F9")\ndef test_it() -> None: ...', "2: unknown requirement 'F9'"),
    "a mark on a helper": ('@pytest.mark.req("F1")\ndef helper() -> None: ...', "2: this mark is on nothing"),
    "a mark on a fixture": (
        '@pytest.fixture(params=[pytest.param(1, marks=pytest.mark.req("F1"))])\ndef number() -> None: ...',
        "2: this mark is on nothing",
    ),
    "a mark in a module without tests": ('pytestmark = pytest.mark.req("F1")', "2: this mark is on nothing"),
    "a mark in a class pytest ignores": (
        'class Helper:\n    @pytest.mark.req("F1")\n    def test_it(self) -> None: ...',
        "3: this mark is on nothing",
    ),
    "a mark without ids": ("@pytest.mark.req()\ndef test_it() -> None: ...", "2: a req mark takes ids"),
    "a mark that is not called": ("@pytest.mark.req\ndef test_it() -> None: ...", "2: a req mark names"),
    "an id that is computed": ('@pytest.mark.req(f"F{1}")\ndef test_it() -> None: ...', "2: a req mark takes ids"),
    "a file that is no Python": ("def (", "2: cannot be parsed"),
}


@pytest.mark.parametrize(("text", "complaint"), REFUSED.values(), ids=REFUSED.keys())
@pytest.mark.parametrize("options", [[], ["--check"]], ids=["write", "check"])
def test_a_mark_that_cannot_be_believed_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, complaint: str, options: list[str]
) -> None:
    """Writing and checking both fail, name file and line, and leave the page alone."""
    root = make_tree(tmp_path, {"test_a.py": text})

    assert run(root, *options) == 1
    assert f"tests/test_a.py:{complaint}" in capsys.readouterr().err
    assert not (root / "docs/conformance.md").exists()


@pytest.mark.parametrize("kept_in", ["", "class TestIt: "], ids=["function", "class"])
def test_a_mark_outside_a_collected_file_fails(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kept_in: str
) -> None:
    """A test in a file that pytest never opens shows nothing, in a test class or not."""
    test = '@pytest.mark.req("F1")\ndef test_it(*args: object) -> None: ...'
    text = f"{kept_in}\n{textwrap.indent(test, '    ')}" if kept_in else f"\n{test}"
    root = make_tree(tmp_path, {"helpers.py": text})

    assert run(root) == 1
    assert "tests/helpers.py:3: this mark is on nothing" in capsys.readouterr().err


def test_an_id_of_another_family_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An id that does not bear its family's prefix is a slip of the pen in the list."""
    root = make_tree(tmp_path, {})
    (root / "docs/requirements.toml").write_text(REQUIREMENTS + 'S1 = "Strayed."\n')

    assert run(root) == 1
    assert "S1 stands among the F requirements" in capsys.readouterr().err


def test_the_page_goes_stale_and_is_renewed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A missing page and one that lacks a new mark fail the check until the page is written again."""
    root = make_tree(tmp_path, {"test_a.py": "def test_it() -> None: ..."})
    assert run(root, "--check") == 1
    assert run(root) == 0
    assert run(root, "--check") == 0

    (root / "tests/test_a.py").write_text('import pytest\n@pytest.mark.req("F1")\ndef test_it() -> None: ...')

    capsys.readouterr()
    assert run(root, "--check") == 1
    assert "is stale" in capsys.readouterr().err
    assert rows(root)["F1"] == []
    assert run(root) == 0
    assert run(root, "--check") == 0


def test_a_line_number_does_not_make_the_page_stale(tmp_path: Path) -> None:
    """Moving a test within its file leaves the page current."""
    text = '@pytest.mark.req("F1")\ndef test_it() -> None: ...'
    root = make_tree(tmp_path, {"test_a.py": text})
    assert run(root) == 0

    (root / "tests/test_a.py").write_text("import pytest\n\n\n\n" + text)

    assert run(root, "--check") == 0


def test_the_page_counts_and_escapes(tmp_path: Path) -> None:
    """The top of the page has the counts, and a line may contain the table's own separator."""
    root = make_tree(tmp_path, {"test_a.py": MARKED["among several ids"]})
    assert run(root) == 0

    page = (root / "docs/conformance.md").read_text()

    assert (
        "Of 3 requirements 2 are shown by tests, 0 are measured by benchmarks, 0 are not met as written, and 1 are open."
        in page
    )
    assert "| [F](#f-first) | First | 2 | 0 | 0 | 1 | 3 |" in page
    assert "| F2 | Either \\| or. | `tests/test_a.py::test_it` |" in page
    assert "| F3 | Nobody showed this. | open |" in page


@pytest.mark.parametrize(
    ("prefix", "ids"),
    [
        ("F", [f"F{n}" for n in range(1, 138)]),
        ("S", [f"S{n}" for n in range(1, 34)]),
        ("SC", [f"SC{n:02}" for n in range(19)]),
        ("H", [f"H{n}" for n in range(1, 80)]),
        ("R", [f"R{n}" for n in range(1, 243)]),
        ("T", [f"T{n}" for n in range(1, 7)]),
        ("C", [f"C{n}" for n in range(1, 7)]),
        ("L", [f"L{n}" for n in range(1, 9)]),
    ],
)
def test_no_requirement_is_left_out(prefix: str, ids: list[str]) -> None:
    """Our own list has every id of every family, in order, each with a line that ends as a sentence."""
    families, problems = parse_requirements((REPOSITORY / "docs/requirements.toml").read_text(encoding="utf-8"))
    lines = {family.prefix: family.lines for family in families}[prefix]

    assert problems == []
    assert list(lines) == ids
    assert all(line.endswith(".") and "\n" not in line for line in lines.values())


NOTES = """
[F.measured]
F2 = "`python -m bench`, row `either | or`."

[F.unmet]
F3 = "No folder | of its own; a file holds instead."
"""


def test_what_is_measured_or_unmet_says_so_on_the_page(tmp_path: Path) -> None:
    """A measured requirement names its benchmark, an unmet one what is lacking; each is counted as what it is."""
    root = make_tree(tmp_path, {"test_a.py": '@pytest.mark.req("F1")\ndef test_it() -> None: ...\n'})
    (root / "docs/requirements.toml").write_text(REQUIREMENTS + NOTES)

    assert run(root) == 0
    page = (root / "docs/conformance.md").read_text()
    assert (
        "Of 3 requirements 1 are shown by tests, 1 are measured by benchmarks, 1 are not met as written, and 0 are"
        in page
    )
    assert "| F2 | Either \\| or. | measured: `python -m bench`, row `either \\| or`. |" in page
    assert "| **not met as written**: No folder \\| of its own; a file holds instead. |" in page


@pytest.mark.parametrize("claimed", ["F2", "F3"])
def test_a_mark_for_what_is_measured_or_unmet_is_refused(
    tmp_path: Path, claimed: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A test cannot claim what the requirements say no test shows."""
    root = make_tree(tmp_path, {"test_a.py": f'@pytest.mark.req("{claimed}")\ndef test_it() -> None: ...\n'})
    (root / "docs/requirements.toml").write_text(REQUIREMENTS + NOTES)

    assert run(root) == 1
    assert f"tests/test_a.py:2: {claimed} is said to be" in capsys.readouterr().err


def test_notes_on_what_is_no_requirement_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A note must belong to a requirement, and to one state."""
    root = make_tree(tmp_path, {})
    notes = '[F.measured]\nF2 = "x"\nF9 = "x"\n[F.unmet]\nF2 = "y"\n'
    (root / "docs/requirements.toml").write_text(REQUIREMENTS + notes)

    assert run(root) == 1
    told = capsys.readouterr().err
    assert "F9 is said" in told
    assert "F2 is said to be both" in told
