"""A run says what it is doing while it does it."""

from __future__ import annotations

import pytest

from tidings.cli.output import Output
from tidings.cli.pipeline_progress import RunProgress
from tidings.pipeline.session import ProgressStep
from tidings.testing import VirtualClock


async def run(is_json: bool = False) -> None:
    """A stage of two parts that takes three seconds, with another beside it."""
    clock = VirtualClock()
    with RunProgress(Output(is_json=is_json), clock) as progress:
        progress(ProgressStep("bronze", 0, 4))
        progress(ProgressStep("bronze", 2, 4))
        await clock.advance(1)
        progress(ProgressStep("bronze", 4, 4, 1000))
        progress(ProgressStep("bronze", 4, 4, 1000))
        progress(ProgressStep("silver", 0, 1))
        progress(ProgressStep("bronze", 0, 4, 1000))
        await clock.advance(2)
        progress(ProgressStep("bronze", 4, 4, 1500))
        progress(ProgressStep("silver", 1, 1, 7))


async def test_stages_are_told_line_by_line(capsys: pytest.CaptureFixture[str]) -> None:
    """Each stage is told when it begins and once for each part of it that is done, with its rows and its time."""
    await run()

    assert capsys.readouterr().err.splitlines() == [
        "bronze ...",
        "bronze: 1k rows in 1 s",
        "silver ...",
        "bronze: 1.5k rows in 3 s",
        "silver: 7 rows in 2 s",
    ]


async def test_programs_are_told_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    """With --json there is nothing on either stream but the result."""
    await run(is_json=True)

    assert capsys.readouterr() == ("", "")


async def test_a_terminal_has_bars_and_the_lines_stay(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a terminal a stage under way is a bar; what is done is left as a line."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    await run()
    said = capsys.readouterr().err

    assert "bronze: 1.5k rows in 3 s" in said
    assert "bronze ..." not in said
    assert "━" in said
