"""The ledger's records become tables: happenings, custodies, the graph at any seq, what administrators did."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pyspark.sql import SparkSession

from tests.spark_session import TEST_SETTINGS
from tests.unit.pipeline.support import SMALL, Workspace
from tidings.happenings.happening import to_json
from tidings.happenings.variants import HealthStatus
from tidings.ledger import Ledger, open_ledger
from tidings.ledger.catalogue import parse_catalogue
from tidings.ledger.relations import Relations
from tidings.pipeline.jobs.ledger import JOBS

pytestmark = [pytest.mark.spark, pytest.mark.timeout(900)]

CATALOGUE = parse_catalogue(
    """
schema_version = 1
[[subjects]]
name = "track"
description = "a piece of music"
[[subjects]]
name = "album"
description = "several of them"
[[relation]]
predicate = "album_of"
description = "the album that a track is on"
source_type = "track"
target_type = "album"
source_cardinality = "at_most_one"
"""
)


class Told(NamedTuple):
    """What the ledger itself said while the log was written."""

    happenings: list[tuple[int, dict[str, Any]]]
    graphs: dict[int, set[tuple[str, str, str, tuple[str, ...], bool]]]
    """The relations with their claimants, and whether they are hidden, after each step, by the log's seq."""


async def act(folder: Path) -> Told:
    """Claims by two plugins, a merge, a suppression, and two custodies of one handle."""
    graphs: dict[int, set[tuple[str, str, str, tuple[str, ...], bool]]] = {}
    async with await open_ledger(folder, catalogue=CATALOGUE, log_settings=SMALL) as ledger:
        for step in steps(ledger):
            await step
            graphs[ledger.log.position.seq] = await ledger.read(
                lambda state: {
                    (*record.triple, record.claimants, record.is_suppressed)
                    for triple in state.part(Relations).triples.after(None, 1000)
                    if (record := state.part(Relations).get((triple[0], triple[1], triple[2]))) is not None
                }
            )
        told = [(each.seq, to_json(each.happening)) async for each in ledger.happenings.history(0)]
    return Told(told, graphs)


def steps(ledger: Ledger) -> Any:
    """What is done, one call at a time."""
    one, two, admin = ledger.plugin("org.one"), ledger.plugin("org.two"), ledger.admin("adm")
    x, y, a, b = (("name", value) for value in "xyab")
    yield one.announce_subject("track", [x])
    yield two.announce_subject("track", [y])
    yield one.announce_subject("album", [a])
    yield one.announce_subject("album", [b])
    yield one.claim_relation(x, "album_of", a)
    yield two.claim_relation(y, "album_of", b)
    yield two.claim_relation(x, "album_of", a)
    yield admin.suppress_relation(y, "album_of", b, reason="wrong")
    yield admin.merge_subjects(x, y, reason="the same")
    yield one.retract_relation(x, "album_of", a)
    yield one.retract_addressing(b)
    for health in (HealthStatus.HEALTHY, HealthStatus.DEGRADED):
        yield one.take_custody("audio.player", "playback", handle_id="h")
        yield one.report_custody_state("h", health)
        yield one.release_custody("h")


def test_the_tables_say_what_the_ledger_said(spark: SparkSession, tmp_path: Path) -> None:
    """
    Every happening is a row; the graph as of any seq is the ledger's own at that seq; each custody is one row from taking to release; what the
    administrator did is listed with its reason.
    """
    told = asyncio.run(act(tmp_path))
    workspace = Workspace(tmp_path)

    assert workspace.pipeline(TEST_SETTINGS).run(lambda: spark, JOBS).failed == ()

    happenings = workspace.rows("silver.happenings", "happening_seq", "variant", "plugin", "subjects")
    assert [(row[0], row[1]) for row in sorted(happenings)] == [(seq, each["type"]) for seq, each in told.happenings]
    merged = next(row for row in happenings if row[1] == "subject_merged")
    assert (merged[2], len(merged[3])) == ("adm", 3)
    history = workspace.rows(
        "gold.relation_history",
        *("source_id", "predicate", "target_id", "claimants", "is_suppressed", "from_seq", "to_seq"),
    )
    for seq, graph in told.graphs.items():
        there = {
            (source, predicate, target, tuple(claimants), is_suppressed)
            for source, predicate, target, claimants, is_suppressed, from_seq, to_seq in history
            if from_seq <= seq and (to_seq is None or to_seq > seq)
        }
        assert there == graph, seq
    custodies = workspace.rows("gold.custody_timelines", "handle_id", "shelf", "custody_type", "reports", "last_health")
    assert sorted(custodies) == [
        ("h", "audio.player", "playback", 1, "degraded"),
        ("h", "audio.player", "playback", 1, "healthy"),
    ]
    actions = workspace.rows("gold.admin_actions", "admin_plugin", "kind", "reason")
    assert sorted(actions) == [("adm", "relation_suppress", "wrong"), ("adm", "subject_merge", "the same")]
