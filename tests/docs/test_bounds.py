"""The page of limits: every limit has a row or a class, and a mark that shows nothing is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from tools.bounds import limits_of, main

REPOSITORY = Path(__file__).parents[2]
SOURCE = """
from typing import Final
_QUEUE_MAX: Final = 10
RETRY_S = 1.0
NAMES = 3

class NodeSettings:
    body_bytes: int = 5
    max_open: int = 2
    host: str = ""

class Report:
    size_bytes: int
"""
BOUNDS = """
[bounds]
"node._QUEUE_MAX" = "One more is refused."
"node.NodeSettings.body_bytes" = "A larger | body is refused."
"node.NodeSettings.max_open" = "One more is refused."

[exempt.period]
reason = "A pause."
names = ["*.RETRY_S"]
"""
TEST = """
import pytest

@pytest.mark.bound("node._QUEUE_MAX")
@pytest.mark.parametrize("beyond", [11, 100])
def test_queue(beyond): ...
"""


def make_tree(root: Path, *, bounds: str = BOUNDS, test: str = TEST) -> Path:
    for name, text in (("src/tidings/node.py", SOURCE), ("docs/bounds.toml", bounds), ("tests/test_node.py", test)):
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_are_constants_and_settings_by_their_names(tmp_path: Path) -> None:
    """Module constants and fields of settings classes count; fields of other classes and other names do not."""
    names = [limit.name for limit in limits_of(make_tree(tmp_path))]

    assert names == ["node.NodeSettings.body_bytes", "node.NodeSettings.max_open", "node.RETRY_S", "node._QUEUE_MAX"]


def test_the_page_counts_limits_and_names_tests(tmp_path: Path) -> None:
    """A limit with a test names it, one without is open, exempt ones are counted by class."""
    root = make_tree(tmp_path)

    assert main(["--root", str(root), "--check"]) == 1  # There is no page yet.
    assert main(["--root", str(root)]) == 0
    assert main(["--root", str(root), "--check"]) == 0
    page = (root / "docs/bounds.md").read_text()
    assert "The source has 4 limits. 3 of them" in page
    assert "1 are crossed by a test, by one and tenfold, and 2 are open. 1 are exempt." in page
    assert "| `node._QUEUE_MAX` | One more is refused. | `tests/test_node.py::test_queue` |" in page
    assert "| `node.NodeSettings.body_bytes` | A larger \\| body is refused. | open |" in page
    assert "| period | A pause. | 1 |" in page


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (
            {"bounds": BOUNDS.replace('"*.RETRY_S"', "")},
            "node.RETRY_S has no row in docs/bounds.toml and belongs to no",
        ),
        ({"bounds": BOUNDS.replace("*.RETRY_S", "*_S")}, None),
        (
            {"bounds": BOUNDS.replace('"*.RETRY_S"', '"*.RETRY_S", "*.OTHER_S"')},
            "*.OTHER_S of the exempt class 'period'",
        ),
        ({"bounds": BOUNDS.replace("_QUEUE_MAX", "_GONE_MAX")}, "node._GONE_MAX is not a limit of the source"),
        ({"bounds": BOUNDS.replace('"*.RETRY_S"', '"*.RETRY_S", "*_MAX"')}, "has a row and is exempt as 'period'"),
        ({"test": TEST.replace("_QUEUE_MAX", "_OTHER_MAX")}, "'node._OTHER_MAX' has no row"),
        ({"test": TEST.replace("beyond", "value")}, "takes the parameter 'beyond'"),
        ({"test": TEST.replace("def test_queue", "def queue")}, "this mark is on nothing that pytest runs"),
    ],
)
def test_a_table_or_mark_that_is_wrong_is_reported(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], change: dict[str, str], problem: str | None
) -> None:
    """The command fails and names the limit, the row, the pattern or the test."""
    assert main(["--root", str(make_tree(tmp_path, **change))]) == (0 if problem is None else 1)
    assert (problem or "") in capsys.readouterr().err


def test_the_page_of_this_repository_is_current(capsys: pytest.CaptureFixture[str]) -> None:
    """Every limit of this source has a row or a class, and docs/bounds.md is what the tool writes."""
    assert main(["--root", str(REPOSITORY), "--check"]) == 0, capsys.readouterr().err
