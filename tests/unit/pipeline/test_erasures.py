"""One function says what an erasure is and of which space; the jobs, exports and the scrub all go by it."""

from __future__ import annotations

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from tests.integration.cli.support import invoke
from tests.unit.pipeline.support import Workspace, event
from tests.unit.pipeline.test_scrub import fill
from tidings.cognition.jobs.consolidation_memories import CONSOLIDATION_ERASURES_JOBS
from tidings.cognition.jobs.consolidation_retention import CONSOLIDATION_SCRUB_JOBS
from tidings.core.clock import SYSTEM_CLOCK
from tidings.log.record import Record
from tidings.pipeline.erasures import (
    ERASURE_TYPES,
    NO_NAME,
    OTHER_SPACE,
    Erasure,
    RefusedErasure,
    erasures_in,
    read_erasure,
)
from tidings.pipeline.export import Erasures
from tidings.pipeline.lake_scan import record_of
from tidings.pipeline.schemas import SILVER_EVENTS, arrow_schema
from tidings.pipeline.scrub import Scrub, plan_scrub

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

SPACE = "personal:mallory"
OTHER = "personal:victim"


def read(kind: str, payload: object, space_id: str = SPACE) -> Erasure | RefusedErasure | None:
    """What a record with this payload erases."""
    return read_erasure(kind, space_id, json.dumps(payload))


@pytest.mark.parametrize(
    ("kind", "payload", "expected"),
    [
        ("TOMBSTONE_PROPAGATE", {"object_id": "m"}, Erasure(SPACE, False, "m", "memory")),
        ("TOMBSTONE_APPLIED", {"object_id": "m", "object_type": "BLOB"}, Erasure(SPACE, False, "m", "blob")),
        ("TOMBSTONE_APPLIED", {"object_id": "p", "object_type": "Profile"}, Erasure(SPACE, True, "p", "profile")),
        ("TOMBSTONE_PROPAGATE", {"object_id": "", "person_id": "p"}, Erasure(SPACE, False, "p", "memory")),
        ("DSAR_ERASE", {"subject_id": "p", "object_id": "m"}, Erasure(SPACE, True, "p", "profile")),
        ("DSAR_EXPORT", {"request": "Erasure", "user_id": "p"}, Erasure(SPACE, True, "p", "profile")),
        ("DSAR_EXPORT", {"request": "", "action": "erase", "user_id": "p"}, Erasure(SPACE, True, "p", "profile")),
        ("DSAR_EXPORT", {"request": "export", "action": "erase", "user_id": "p"}, None),
        ("DSAR_EXPORT", {"subject_id": "p"}, None),
        ("DSAR_EXPORT", {"request": ["erase"], "subject_id": "p"}, None),
        ("TOMBSTONE_CREATED", {"object_id": "m"}, None),
        ("DSAR_REQUEST", {"request": "erase", "subject_id": "p"}, None),
        ("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": ""}, Erasure(SPACE, False, "m", "memory")),
        ("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": None}, Erasure(SPACE, False, "m", "memory")),
        ("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": SPACE}, Erasure(SPACE, False, "m", "memory")),
        ("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": OTHER}, RefusedErasure(OTHER, OTHER_SPACE)),
        ("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": 5}, RefusedErasure("5", OTHER_SPACE)),
        ("TOMBSTONE_PROPAGATE", {"object_id": 5}, RefusedErasure(SPACE, NO_NAME)),
        ("TOMBSTONE_PROPAGATE", {"object_id": {"id": "m"}}, RefusedErasure(SPACE, NO_NAME)),
        ("TOMBSTONE_PROPAGATE", ["m"], None),
    ],
)
def test_what_an_erasure_is(kind: str, payload: object, expected: Erasure | RefusedErasure | None) -> None:
    """Types, wishes, names and spaces, each as an odd payload may have it."""
    assert read(kind, payload) == expected


def test_a_space_is_the_same_in_another_form_of_unicode() -> None:
    """The log stores names in NFC; a payload may spell its own space otherwise, and means it."""
    found = read("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": "cafe\u0301"}, "caf\u00e9")
    assert found == Erasure("caf\u00e9", False, "m", "memory")


def test_what_cannot_be_read_erases_nothing() -> None:
    """A sealed payload, and text that is no JSON."""
    assert read_erasure("DSAR_ERASE", SPACE, None) is None
    assert read_erasure("DSAR_ERASE", SPACE, b"{") is None
    assert read_erasure("DSAR_ERASE", SPACE, b'{"subject_id": "\xff"}') is None


ODD = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-5, 5)
    | st.floats(allow_nan=False)
    | st.sampled_from(["", "m", "é", "p q"]),
    lambda values: st.lists(values, max_size=2) | st.dictionaries(st.sampled_from(["id", "x"]), values, max_size=2),
    max_leaves=4,
)
NAMES = ("subject_id", "person_id", "user_id", "object_id", "object_type", "request", "kind", "action", "space_id")
PAYLOADS = st.dictionaries(
    st.sampled_from(NAMES), ODD | st.sampled_from(["erase", "Forget", "profile", "PROFILE", SPACE, OTHER]), max_size=6
)
EVENTS = st.lists(
    st.tuples(st.sampled_from([*ERASURE_TYPES, "TOMBSTONE_CREATED", "DSAR_REQUEST", "NOTE"]), PAYLOADS),
    min_size=1,
    max_size=40,
)


def record(seq: int, kind: str, payload: dict[str, Any]) -> Record:
    """A record as the log has it."""
    row = dict.fromkeys(arrow_schema(SILVER_EVENTS.schema).names)
    at = datetime(2026, 3, 1, tzinfo=UTC)
    row |= {"topic": "notes", "offset": seq, "seq": seq, "event_id": f"e{seq}", "type": kind, "space_id": SPACE}
    return record_of({**row, "ts": at, "written_at": at, "partitions": [], "payload": json.dumps(payload)})


@pytest.mark.spark
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(EVENTS)
@example([("TOMBSTONE_PROPAGATE", {"object_id": "m", "space_id": OTHER}), ("DSAR_ERASE", {"subject_id": 5})])
def test_spark_and_python_find_the_same_erasures(spark: SparkSession, events: list[tuple[str, dict[str, Any]]]) -> None:
    """For events of any payload the rows of Spark's form are what the form for single records says, and an export honours those."""
    from pyspark.sql import functions as F

    rows = [
        (seq, f"e{seq}", kind, SPACE, json.dumps(payload), datetime(2026, 3, 1, tzinfo=UTC))
        for seq, (kind, payload) in enumerate(events, 1)
    ]
    frame = spark.createDataFrame(
        rows, "seq long, event_id string, type string, space_id string, payload string, ts timestamp"
    )

    found = {row["erased_seq"]: row for row in erasures_in(frame, F.col("ts")).collect()}

    expected = {seq: read(kind, payload) for seq, (kind, payload) in enumerate(events, 1)}
    honoured = Erasures()
    for seq, (kind, payload) in enumerate(events, 1):
        row, what = found.get(seq), expected[seq]
        assert honoured.add(record(seq, kind, payload)) == isinstance(what, Erasure)
        if row is None:
            assert what is None
        elif isinstance(what, Erasure):
            assert (row["space_id"], row["is_person"], row["object_id"], row["object_type"], row["refusal"]) == (
                what.space_id,
                what.is_person,
                what.object_id,
                what.object_type,
                None,
            )
        else:
            assert isinstance(what, RefusedErasure)
            assert (row["object_id"], row["named_space"], row["refusal"]) == (None, what.named_space, what.reason)


def attacked(folder: Path) -> Workspace:
    """A log in which a publisher of one space erases what is in another one; its own memory too."""
    workspace = Workspace(folder)
    workspace.append(
        [
            event(1, "hippo", {"text": "secret"}, type="HIPPO_ENCODE", space_id=OTHER, event_id="mem-1"),
            event(2, "hippo", {"text": "mine"}, type="HIPPO_ENCODE", space_id=SPACE, event_id="mem-2"),
            event(
                3,
                "notes",
                {"space_id": OTHER, "object_id": "mem-1"},
                type="TOMBSTONE_PROPAGATE",
                space_id=SPACE,
                event_id="t1",
            ),
            event(4, "notes", {"object_id": "mem-2"}, type="TOMBSTONE_PROPAGATE", space_id=SPACE, event_id="t2"),
        ]
    )
    return workspace


def test_an_export_honours_erasures_of_their_own_space_only(tmp_path: Path) -> None:
    """The victim's record is exported, the publisher's own is not, and the command says that one erasure was refused."""
    workspace = attacked(tmp_path / "ws")
    out = tmp_path / "out.jsonl"

    done = invoke("pipeline", "export", "-o", out, "--json", "-w", workspace.folder)

    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert (found["left_out"], found["refused_erasures"]) == (1, 1)
    assert [json.loads(line)["meta"]["event_id"] for line in out.read_text().splitlines()] == ["mem-1", "t1", "t2"]


def test_a_scrub_reads_each_erasure_again_before_anything_goes(tmp_path: Path) -> None:
    """
    A list that an earlier version wrote names the victim's row: it stays, and the dry run and the scrub say so. What a job listed
    without an erasure that is in bronze stays too.
    """
    workspace = attacked(tmp_path / "ws")
    assert invoke("pipeline", "run", "--jobs", "none", "-w", workspace.folder).exit_code == 0
    (output,) = CONSOLIDATION_SCRUB_JOBS[0].writes
    listed = [(OTHER, "mem-1", "t1", 3), (SPACE, "mem-2", "t2", 4), (OTHER, "mem-1", "never", 9)]
    rows = [
        {"table": "silver.events", "space_id": space_id, "row_key": key, "erased_by": by, "erased_seq": seq}
        for space_id, key, by, seq in listed
    ]
    fill(workspace.lake, output.table, output.schema, rows)

    plan = plan_scrub(workspace.lake)
    assert plan.rows == {"bronze.events": 1, "silver.events": 1}
    assert plan.refused == frozenset({"t1", "never"})
    dry = invoke("pipeline", "scrub", "--dry-run", "-w", workspace.folder)
    assert "2 listed erasures have no right to the space of their rows" in dry.stderr
    Scrub(workspace.lake, "r", SYSTEM_CLOCK.now_ns()).carry_out(plan)

    payloads = dict(workspace.rows("bronze.events", "event_id", "payload"))
    assert (payloads["mem-1"], payloads["mem-2"]) == ('{"text":"secret"}', None)


@pytest.mark.spark
def test_gold_lists_refused_erasures_apart(spark: SparkSession, tmp_path: Path) -> None:
    """``gold.erasures`` has the publisher's own, ``gold.refused_erasures`` the one that names another space, and why."""
    from tests.spark_session import TEST_SETTINGS

    workspace = attacked(tmp_path / "ws")
    assert workspace.pipeline(TEST_SETTINGS).run(lambda: spark, CONSOLIDATION_ERASURES_JOBS).failed == ()

    assert workspace.rows("gold.erasures", "space_id", "object_id", "erased_by") == [(SPACE, "mem-2", "t2")]
    assert workspace.rows("gold.refused_erasures", "space_id", "named_space", "reason", "erased_by") == [
        (SPACE, OTHER, OTHER_SPACE, "t1")
    ]
