"""How much each bench does: enough to measure, enough to look, or just enough to show that it runs."""

from __future__ import annotations

from typing import Final

import msgspec

__all__ = ["FULL", "QUICK", "TINY", "Scale"]


class Scale(msgspec.Struct, frozen=True, kw_only=True):
    """The sizes of one run. A bench stops beginning rounds when its ``bench_s_max`` is used up."""

    name: str
    bench_s_max: float
    rounds: int
    one_count: int
    """Single publishes in a round."""
    many_events: int
    """Events published in a round."""
    many_warm_up: int
    replay_sizes: tuple[int, int, int]
    """Records in the logs that are sought in; the last is replayed too."""
    seeks: int
    topics: int
    """Topics of a log that is closed and opened."""
    open_records: int
    look_ups: int
    killed_events: int
    """What the writer that is killed had acknowledged since it opened the log."""
    journal_bytes: int
    journal_count: int
    bus_events: int
    """Events through the bus in a round."""
    rival_events: int
    """Events through each thing that the bus is compared with."""
    bus_latency_s: float
    """How long the bus is kept at its rate."""
    catch_up_records: int
    """How far a group lags behind."""
    happenings: int
    """Happenings that are emitted in a round, and replayed."""
    happenings_filters: int
    """Subscribers of which each has a filter of its own."""
    happenings_pace_s: float
    """How long their rate is kept."""
    graph_edges: int
    """Relations of a graph."""
    door_relations: int
    """Relations of the ledger beside whose dearest requests other doors are timed."""
    sync_events: int
    """Events that a sync client submits in a round."""
    sync_rival_events: int
    """The same at the server that the sync endpoint is compared with."""
    hearers: int
    """Who hears of single events at a steady rate."""
    latency_s: float
    """How long that rate is kept."""
    sync_connections: int
    """Idle connections."""
    sync_catch_up: int
    """Events that a new sync client has yet to get."""
    sync_large_records: int
    """Records of the log in which a small partition is looked for."""
    gateway_subscribers: int
    """Subscribers that every envelope goes to."""
    gateway_events: int
    """Envelopes for all of them in a round."""
    gateway_connections: int
    """Idle subscribers."""
    gateway_others: int
    """Subscribers of other objects."""
    gateway_returning: int
    """Clients that come back after a restart."""
    pipeline_events: int
    """Events that go from segments to the lake."""
    pipeline_histories: tuple[int, ...]
    """Events that are in the lake when new ones come, each in a log of its own."""
    pipeline_new: int
    """Events that come in between two runs of the pipeline."""
    appointments: int
    """Appointments that wait."""
    appointments_pace_s: float
    """How long others fire meanwhile."""


FULL: Final = Scale(
    name="full",
    bench_s_max=110,
    rounds=7,
    one_count=500,
    many_events=100_000,
    many_warm_up=20_000,
    replay_sizes=(10_000, 100_000, 1_000_000),
    seeks=400,
    topics=10_000,
    open_records=10_000_000,
    look_ups=100_000,
    killed_events=50_000,
    journal_bytes=32 << 20,
    journal_count=4,
    bus_events=200_000,
    rival_events=5_000,
    bus_latency_s=20.0,
    catch_up_records=5_000_000,
    happenings=200_000,
    happenings_filters=1_000,
    happenings_pace_s=20.0,
    graph_edges=1_000_000,
    door_relations=100_000,
    sync_events=100_000,
    sync_rival_events=10_000,
    hearers=100,
    latency_s=20.0,
    sync_connections=5_000,
    sync_catch_up=100_000,
    sync_large_records=5_000_000,
    gateway_subscribers=1_000,
    gateway_events=500,
    gateway_connections=10_000,
    gateway_others=1_000,
    gateway_returning=5_000,
    pipeline_events=5_000_000,
    pipeline_histories=(200_000, 5_000_000),
    pipeline_new=10_000,
    appointments=1_000_000,
    appointments_pace_s=10.0,
)
QUICK: Final = Scale(
    name="quick",
    bench_s_max=8,
    rounds=2,
    one_count=200,
    many_events=20_000,
    many_warm_up=4_000,
    replay_sizes=(1_000, 10_000, 100_000),
    seeks=100,
    topics=2_000,
    open_records=500_000,
    look_ups=20_000,
    killed_events=20_000,
    journal_bytes=2 << 20,
    journal_count=4,
    bus_events=30_000,
    rival_events=1_000,
    bus_latency_s=1.0,
    catch_up_records=200_000,
    happenings=40_000,
    happenings_filters=1_000,
    happenings_pace_s=2.0,
    graph_edges=50_000,
    door_relations=20_000,
    sync_events=10_000,
    sync_rival_events=2_000,
    hearers=100,
    latency_s=2.0,
    sync_connections=500,
    sync_catch_up=20_000,
    sync_large_records=200_000,
    gateway_subscribers=1_000,
    gateway_events=200,
    gateway_connections=1_000,
    gateway_others=1_000,
    gateway_returning=500,
    pipeline_events=500_000,
    pipeline_histories=(20_000, 500_000),
    pipeline_new=10_000,
    appointments=50_000,
    appointments_pace_s=2.0,
)
TINY: Final = Scale(
    name="tiny",
    bench_s_max=60,
    rounds=1,
    one_count=5,
    many_events=600,
    many_warm_up=50,
    replay_sizes=(50, 200, 1_000),
    seeks=5,
    topics=20,
    open_records=3_000,
    look_ups=200,
    killed_events=600,
    journal_bytes=1 << 20,
    journal_count=2,
    bus_events=400,
    rival_events=60,
    bus_latency_s=0.1,
    catch_up_records=2_000,
    happenings=600,
    happenings_filters=20,
    happenings_pace_s=0.1,
    graph_edges=500,
    door_relations=200,
    sync_events=200,
    sync_rival_events=100,
    hearers=4,
    latency_s=0.1,
    sync_connections=20,
    sync_catch_up=1_000,
    sync_large_records=1_000,
    gateway_subscribers=20,
    gateway_events=100,
    gateway_connections=20,
    gateway_others=20,
    gateway_returning=20,
    pipeline_events=4_000,
    pipeline_histories=(1_000, 4_000),
    pipeline_new=200,
    appointments=3_000,
    appointments_pace_s=0.2,
)
