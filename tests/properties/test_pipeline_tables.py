"""On logs that nobody would write by hand, every table holds what DuckDB finds in the raw files."""

from __future__ import annotations

import tempfile
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

from tests.properties.pipeline_logs import DAMAGES, damage, events_of, give_up
from tests.properties.pipeline_oracle import RawLog, differences
from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import Workspace
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.keys import DerivedKeys
from tidings.log.settings import LogSettings
from tidings.pipeline.jobs.registry import all_jobs, choose

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.slow, pytest.mark.heavy, pytest.mark.timeout(900)]

WORDS = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), min_size=1, max_size=12)
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**53), 2**53)
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
PAYLOADS = st.dictionaries(st.text(max_size=8), JSON, max_size=4)
MOMENTS = st.integers(-(10**15), 2 * 10**15).map(
    lambda time_us: datetime.fromtimestamp(0, UTC) + timedelta(microseconds=time_us)
) | st.sampled_from([datetime(2026, 11, 15, 23, 59, 59, 999_999, tzinfo=UTC), datetime(2026, 11, 16, tzinfo=UTC)])
KINDS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(["MADE", "a.b"]),
        "topic": st.sampled_from(["busy", "busy", "busy", "quiet", "sync", "sync.projects", "sync.legacy"]),
        "space_id": st.sampled_from(["shared:home", "secret"]) | WORDS,
        "event_id": WORDS,
        "payload": PAYLOADS,
        "copies": st.sampled_from([1, 2, 7, 60]),
        "partitions": st.lists(st.sampled_from(["p1", "p2"]) | WORDS, max_size=3),
    },
    optional={
        "ts": MOMENTS,
        "actor": WORDS
        | st.sampled_from(["7", "null", '"quoted"'])
        | st.fixed_dictionaries({"a": JSON, "payload": JSON}),
        "trace_id": WORDS,
        "idem_key": WORDS,
        "ttl_sec": st.integers(1, 10**6),
        "device": WORDS,
        "band": st.sampled_from(["GREEN", "AMBER", "RED", "BLACK"]),
        "priority": st.integers(1, 10),
        "extra": st.dictionaries(st.text(min_size=1, max_size=8), JSON, max_size=3),
    },
)
ERRORS = (
    "connection refused by 10.0.0.7",
    "disk quota of 5 exceeded",
    "invalid field 'x7'",
    "deadlock on row 12",
    "poison pill",
    "the worker was killed",
    "boom 31",
)
PLANS = st.fixed_dictionaries(
    {
        "first": st.lists(KINDS, min_size=1, max_size=5),
        "later": st.lists(KINDS, min_size=1, max_size=3),
        "segment_lines_max": st.sampled_from([1, 4, 50_000]),
        "large_at": st.none() | st.integers(0, 3),
        "repeats": st.integers(0, 20),
        "damages": st.lists(st.tuples(st.sampled_from(DAMAGES), st.integers(0, 10_000)), max_size=4),
        "letters": st.lists(st.tuples(st.sampled_from(ERRORS), st.integers(0, 10_000), st.integers(1, 4)), max_size=6),
    }
)
JOBS = choose(all_jobs(), ["topic_minutes", "group_health", "dead_letter_categories"])


@given(PLANS)
@settings(
    max_examples=5,
    deadline=None,
    phases=[Phase.explicit, Phase.generate],  # an example is a run of Spark: finding a smaller one takes too long
    suppress_health_check=list(HealthCheck),
)
def test_every_table_is_what_the_files_say(spark: SparkSession, plan: dict[str, Any]) -> None:
    """
    After two runs, with records dropped, ids sent again and lines damaged in between, no table has a row too many or too few.
    """
    with tempfile.TemporaryDirectory() as folder:
        workspace = Workspace(
            Path(folder),
            LogSettings(journal_bytes=1 << 20, segment_lines_max=plan["segment_lines_max"]),
            AesGcmEncryptor(DerivedKeys(b"\x07" * 32, spaces=("secret",))),
        )
        raw = RawLog()
        early = list(events_of(plan["first"], 0, plan["large_at"]))
        workspace.append(early)
        raw.take(workspace)
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS)
        reached = workspace.pipeline(TEST_SETTINGS).reached()

        workspace.retain("busy", 0, archived={"busy": 1 << 40})
        again = [early[number % len(early)] for number in range(plan["repeats"])]
        workspace.append([*events_of(plan["later"], 10_000, None), *again])
        give_up(workspace, plan["letters"])
        for how, number in plan["damages"]:
            damage(workspace, how, number, reached)
        raw.take(workspace)
        workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS)

        assert differences(workspace, raw) == {}
