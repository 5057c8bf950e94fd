"""A file of a table that is not finished: nothing is printed, and no file is left."""

from __future__ import annotations

import contextlib
import gc
import sys
from pathlib import Path

import pyarrow as pa  # type: ignore[import-untyped]
import pytest

from tidings.pipeline.storage import Storage
from tidings.pipeline.table_files import FileOutput


def test_an_interrupted_file_leaves_nothing_and_prints_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C while rows are written: the writer's destructor does not write to the closed file."""
    unraisable: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", unraisable.append)
    schema = pa.schema([("n", pa.int64())])
    with contextlib.suppress(KeyboardInterrupt), FileOutput(Storage.of(str(tmp_path)), "a.parquet", schema) as output:
        output.add(pa.table({"n": [1, 2]}, schema))
        raise KeyboardInterrupt
    del output
    gc.collect()
    assert unraisable == []
    assert not [path for path in tmp_path.iterdir() if path.stat().st_size]
