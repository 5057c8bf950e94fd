"""An index never hides a record it covers, in memory and on disk alike; and one on disk can always be had."""

from __future__ import annotations

import errno
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

import lmdb
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.beyond import Beyond, crossed
from tidings.log.embedded import index as index_module
from tidings.log.embedded import lmdb_index, lmdb_tables
from tidings.log.embedded.index import (
    OFFSET_MAX,
    SEQ_MAX,
    Index,
    IndexDamaged,
    IndexEntry,
    IndexFull,
    IndexLimit,
    MemoryIndex,
    RecordLocation,
    fingerprint_of_idem,
)
from tidings.log.embedded.lmdb_index import LmdbIndex
from tidings.log.errors import LogClosed, ReadOnlyLog, WorkspaceBusy

MIB: Final = 1 << 20
MAP_BYTES_MAX: Final = 256 * MIB


def entry(
    seq: int,
    *,
    topic: str = "demo",
    offset: int | None = None,
    event_id: str | None = None,
    idem_key: str | None = None,
    space_id: str = "home",
    partitions: tuple[str, ...] = (),
) -> IndexEntry:
    return IndexEntry(seq, topic, seq - 1 if offset is None else offset, event_id, idem_key, space_id, partitions)


def open_index(
    path: Path, *, epoch: str = "e1", map_bytes_max: int = MAP_BYTES_MAX, read_only: bool = False
) -> LmdbIndex:
    return LmdbIndex.open(path, epoch=epoch, map_bytes_max=map_bytes_max, read_only=read_only)


@pytest.fixture(params=["memory", "lmdb"])
def index(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Index]:
    made: Index = MemoryIndex() if request.param == "memory" else open_index(tmp_path / "index")
    yield made
    made.close()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "index"


def seqs(places: list[RecordLocation]) -> list[int]:
    return [place.seq for place in places]


class TestAnyIndex:
    """What holds in memory and on disk."""

    def test_a_new_index_is_empty(self, index: Index) -> None:
        """A new index covers nothing, finds nothing, and was not reset."""
        assert index.covers == 0
        assert index.was_reset is None
        assert index.find_id("a") == []
        assert index.find_idem("demo", "home", "k") == []
        assert index.partition("p", since=0, until=None, limit=10) == []
        assert index.stats()[0] == 0

    def test_an_id_leads_to_its_record(self, index: Index) -> None:
        """An event id leads to the place of its record, whatever the topic, and to no other."""
        index.add([entry(1, event_id="a"), entry(2, topic="other", offset=0, event_id="b")], 2)

        assert index.find_id("a") == [RecordLocation(1, "demo", 0)]
        assert index.find_id("b") == [RecordLocation(2, "other", 0)]
        assert index.find_id("c") == []
        assert index.has_ids(["c", "b", "d", "a"]) == {"a", "b"}
        assert index.has_ids([]) == set()
        assert index.covers == 2

    def test_a_record_without_an_id_of_its_own_takes_no_entry(self, index: Index) -> None:
        """A record whose id the log made and that names nothing else is covered without an entry."""
        index.add([entry(1)], 1)

        assert index.covers == 1
        assert index.stats().entries == 0

    def test_an_idempotency_key_counts_within_topic_and_space(self, index: Index) -> None:
        """The same key in another topic or space is another key."""
        index.add(
            [
                entry(1, idem_key="k"),
                entry(2, idem_key="k", space_id="work"),
                entry(3, idem_key="k", topic="other", offset=0),
            ],
            3,
        )

        assert seqs(index.find_idem("demo", "home", "k")) == [1]
        assert seqs(index.find_idem("demo", "work", "k")) == [2]
        assert index.find_idem("other", "home", "k") == [RecordLocation(3, "other", 0)]
        assert index.find_idem("other", "work", "k") == []
        assert index.find_id("k") == []

    def test_colliding_fingerprints_give_all_candidates(self, index: Index, monkeypatch: pytest.MonkeyPatch) -> None:
        """Ids and keys that share a fingerprint all come back, in seq order, so that none hides another."""
        monkeypatch.setattr(index_module, "fingerprint", lambda _scope, _text: b"same key")
        monkeypatch.setattr(lmdb_tables, "collect_keys", index_module.collect_keys_py)
        index.add([entry(2, event_id="b", idem_key="y"), entry(1, event_id="a", idem_key="x")], 2)
        index.add([entry(3, event_id="c")], 3)

        assert seqs(index.find_id("a")) == [1, 2, 3]
        assert seqs(index.find_idem("demo", "home", "y")) == [1, 2]

        index.remove([entry(2, event_id="b", idem_key="y")])

        assert seqs(index.find_id("b")) == [1, 3]
        assert seqs(index.find_idem("demo", "home", "y")) == [1]

    @pytest.mark.parametrize(
        ("since", "until", "limit", "forwards", "backwards"),
        [
            (0, None, 99, [1, 3, 5, 7, 9], [9, 7, 5, 3, 1]),
            (0, None, 2, [1, 3], [9, 7]),
            (3, None, 99, [5, 7, 9], [9, 7, 5]),
            (2, None, 99, [3, 5, 7, 9], [9, 7, 5, 3]),
            (0, 5, 99, [1, 3, 5], [5, 3, 1]),
            (0, 6, 99, [1, 3, 5], [5, 3, 1]),
            (3, 7, 1, [5], [7]),
            (0, 0, 99, [], []),
            (5, 5, 99, [], []),
            (9, None, 99, [], []),
            (7, 3, 99, [], []),
            (0, SEQ_MAX, 99, [1, 3, 5, 7, 9], [9, 7, 5, 3, 1]),
            (SEQ_MAX, None, 99, [], []),
            (0, None, 0, [], []),
        ],
    )
    def test_a_partition_is_read_after_since_up_to_until(
        self, index: Index, since: int, until: int | None, limit: int, forwards: list[int], backwards: list[int]
    ) -> None:
        """A partition's records come in seq order, ``since`` excluded and ``until`` included, either way round."""
        odd = [entry(seq, partitions=("a", "odd")) for seq in (9, 1, 5, 3, 7)]
        even = [entry(seq, partitions=("a", "even", "odder")) for seq in (8, 2, 6, 4)]
        index.add(odd + even, 9)

        assert seqs(index.partition("odd", since=since, until=until, limit=limit)) == forwards
        assert seqs(index.partition("odd", since=since, until=until, limit=limit, backwards=True)) == backwards

    def test_a_partition_of_one_record_is_read_both_ways(self, index: Index) -> None:
        """A single record is found from below and from above, and only within its bounds."""
        index.add([entry(5, partitions=("p",))], 5)

        for backwards in (False, True):
            assert index.partition("p", since=4, until=5, limit=9, backwards=backwards) == [
                RecordLocation(5, "demo", 4)
            ]
            assert index.partition("p", since=5, until=None, limit=9, backwards=backwards) == []
            assert index.partition("p", since=0, until=4, limit=9, backwards=backwards) == []

    def test_partition_order_is_seq_order_over_topics(self, index: Index) -> None:
        """Records of several topics in one partition come in seq order, however many there are."""
        order = list(range(1, 2001))
        random.Random(7).shuffle(order)
        for lot in range(0, 2000, 250):
            index.add(
                [entry(seq, topic=f"t{seq % 3}", offset=seq // 3, partitions=("p",)) for seq in order[lot : lot + 250]],
                0,
            )

        places = index.partition("p", since=0, until=None, limit=5000)

        assert places == [RecordLocation(seq, f"t{seq % 3}", seq // 3) for seq in range(1, 2001)]
        assert index.partition("p", since=500, until=1500, limit=3, backwards=True) == places[1499:1496:-1]

    def test_entering_again_changes_nothing(self, index: Index) -> None:
        """The same entries a second time leave answers and counts as they were, and ``covers`` does not go back."""
        entries = [entry(seq, event_id=f"e{seq}", idem_key="k", partitions=("p",)) for seq in (1, 2, 3)]
        index.add(entries, 3)
        before = index.stats()

        index.add(entries[:2], 2)

        assert index.stats()._replace(size_bytes=0) == before._replace(size_bytes=0)
        assert index.covers == 3
        assert seqs(index.find_id("e1")) == [1]
        assert seqs(index.find_idem("demo", "home", "k")) == [1, 2, 3]

    def test_removed_records_are_forgotten_and_others_kept(self, index: Index) -> None:
        """Removing takes exactly the entries named, once or twice, and leaves ``covers`` alone."""
        entries = [
            entry(1, event_id="a", idem_key="x", partitions=("p", "q")),
            entry(2, event_id="b", idem_key="y", partitions=("p",)),
            entry(3, event_id="c", partitions=("p",)),
        ]
        index.add(entries, 3)

        for _ in range(2):
            index.remove([entries[0], entries[2], entry(9, topic="never seen", event_id="a", partitions=("p",))])

            assert index.find_id("a") == index.find_id("c") == index.find_idem("demo", "home", "x") == []
            assert seqs(index.find_id("b")) == seqs(index.find_idem("demo", "home", "y")) == [2]
            assert seqs(index.partition("p", since=0, until=None, limit=9)) == [2]
            assert index.partition("q", since=0, until=None, limit=9) == []
            assert index.covers == 3
            assert index.stats().partitions == 1

    def test_stats_count_entries_and_partitions(self, index: Index) -> None:
        """Stats count every id, key and membership, and each partition once."""
        index.add([entry(1, event_id="a", partitions=("p", "q")), entry(2, idem_key="k", partitions=("q", "r"))], 2)

        stats = index.stats()

        assert (stats.entries, stats.partitions, stats.covers) == (6, 3, 2)

    def test_reset_forgets_everything(self, index: Index) -> None:
        """After a reset the index is as good as new, and takes entries again."""
        index.add([entry(1, event_id="a", idem_key="k", partitions=("p",))], 1)

        index.reset()

        assert index.covers == 0
        assert index.find_id("a") == index.find_idem("demo", "home", "k") == []
        assert index.partition("p", since=0, until=None, limit=9) == []
        assert (index.stats().entries, index.stats().partitions) == (0, 0)
        index.add([entry(1, topic="new", event_id="a")], 1)
        assert index.find_id("a") == [RecordLocation(1, "new", 0)]

    @pytest.mark.bound("log.embedded.index.OFFSET_MAX")
    @crossed
    def test_a_full_topic_is_refused(self, index: Index, beyond: Beyond) -> None:
        """The last offset of a topic is entered; beyond it the batch is refused, and another topic is entered."""
        index.add([entry(1, offset=OFFSET_MAX, event_id="a")], 1)
        with pytest.raises(IndexLimit, match="offset"):
            index.add([entry(2, offset=beyond(OFFSET_MAX), event_id="b")], 2)
        index.add([entry(2, topic="other", event_id="c")], 2)
        assert (len(index.find_id("a")), index.find_id("b"), len(index.find_id("c"))) == (1, [], 1)

    def test_the_largest_place_fits(self, index: Index) -> None:
        """The highest seq and offset come back as they went in."""
        place = RecordLocation(SEQ_MAX, "demo", OFFSET_MAX)

        index.add([entry(*place[:1], offset=OFFSET_MAX, event_id="a", partitions=("p",))], SEQ_MAX)

        assert index.find_id("a") == [place]
        assert index.partition("p", since=SEQ_MAX - 1, until=None, limit=9) == [place]
        assert index.partition("p", since=0, until=SEQ_MAX, limit=9, backwards=True) == [place]
        assert index.covers == SEQ_MAX

    @pytest.mark.parametrize(
        ("bad", "field"),
        [
            (entry(2, offset=OFFSET_MAX + 1, event_id="b"), "offset"),
            (entry(2, offset=-1, event_id="b"), "offset"),
            (entry(SEQ_MAX + 1, offset=1, event_id="b"), "seq"),
            (entry(0, offset=1, event_id="b"), "seq"),
            (entry(2, event_id="b", partitions=("p" * 512,)), "partition"),
            (entry(2, event_id="b", partitions=("",)), "partition"),
        ],
    )
    def test_what_does_not_fit_is_named_and_nothing_is_entered(self, index: Index, bad: IndexEntry, field: str) -> None:
        """A value beyond the format is refused by name, and takes the whole batch with it."""
        with pytest.raises(IndexLimit, match=field):
            index.add([entry(1, event_id="a"), bad], 2)

        assert index.find_id("a") == []
        assert index.covers == 0

    def test_odd_text_is_only_text(self, index: Index) -> None:
        """Names in any script are found, and a string that no record can have is found nowhere."""
        index.add([entry(1, event_id="ключ", idem_key="鍵", space_id="家", partitions=("p/ä", "p/ä/b"))], 1)

        assert seqs(index.find_id("ключ")) == [1]
        assert seqs(index.find_idem("demo", "家", "鍵")) == [1]
        assert seqs(index.partition("p/ä", since=0, until=None, limit=9)) == [1]
        assert index.partition("p/", since=0, until=None, limit=9) == []
        assert index.find_id("\ud800") == index.find_id("") == []

    def test_a_closed_index_says_so(self, index: Index) -> None:
        """After closing, twice if need be, every use is refused with the log's own error."""
        index.close()
        index.close()

        uses: list[Callable[[], object]] = [
            lambda: index.covers,
            lambda: index.add([], 1),
            lambda: index.remove([]),
            lambda: index.reset(),
            lambda: index.find_id("a"),
            lambda: index.find_idem("demo", "home", "k"),
            lambda: index.partition("p", since=0, until=None, limit=1),
            lambda: index.stats(),
        ]
        for use in uses:
            with pytest.raises(LogClosed):
                use()

    def test_finding_goes_on_while_entries_are_added(self, index: Index) -> None:
        """Readers in other threads see every record that was covered when they asked, while adding goes on."""
        batches, size = 30, 200
        problems: list[str] = []
        done = threading.Event()
        asked = threading.Barrier(4)

        def ask(seed: int) -> None:
            chosen = random.Random(seed)
            count = 0
            asked.wait(timeout=30)
            while not done.is_set() or count < 50:
                covers = index.covers
                count += 1
                if covers == 0:
                    continue
                seq = chosen.randint(1, covers)
                if RecordLocation(seq, "demo", seq - 1) not in index.find_id(f"e{seq}"):
                    problems.append(f"seq {seq} of {covers} is missing")
                if seqs(index.partition("p", since=seq - 1, until=covers, limit=3)) != list(
                    range(seq, min(covers, seq + 2) + 1)
                ):
                    problems.append(f"partition at seq {seq} of {covers}")

        readers = [threading.Thread(target=ask, args=(seed,)) for seed in range(3)]
        for reader in readers:
            reader.start()
        asked.wait(timeout=30)
        try:
            for batch in range(batches):
                first = batch * size + 1
                index.add(
                    [entry(seq, event_id=f"e{seq}", partitions=("p",)) for seq in range(first, first + size)],
                    first + size - 1,
                )
        finally:
            done.set()
            for reader in readers:
                reader.join(timeout=60)

        assert problems == []
        assert index.covers == batches * size


@given(left=st.tuples(st.text(), st.text(), st.text()), right=st.tuples(st.text(), st.text(), st.text()))
def test_what_an_idempotency_key_is_made_of_cannot_be_shifted(
    left: tuple[str, str, str], right: tuple[str, str, str]
) -> None:
    """Two keys have one fingerprint only if topic, space and key are each the same."""
    assert (fingerprint_of_idem(*left) == fingerprint_of_idem(*right)) == (left == right)


def test_the_parts_of_an_idempotency_key_are_kept_apart() -> None:
    """Moving a letter from one part to the next makes another key."""
    assert fingerprint_of_idem("ab", "c", "d") != fingerprint_of_idem("a", "bc", "d")
    assert fingerprint_of_idem("a", "bc", "d") != fingerprint_of_idem("a", "b", "cd")


_ENTRIES: Final = st.builds(
    entry,
    st.integers(1, 12),
    topic=st.sampled_from(["t", "u"]),
    offset=st.integers(0, 3),
    event_id=st.sampled_from([None, "a", "b", "c"]),
    idem_key=st.sampled_from([None, "k", "l"]),
    partitions=st.sampled_from([(), ("p",), ("p", "q"), ("q", "r")]),
)


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["add", "add", "remove", "reopen"]), st.lists(_ENTRIES, max_size=8)), max_size=12
    )
)
def test_the_index_on_disk_answers_like_the_one_in_memory(
    steps: list[tuple[str, list[IndexEntry]]], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is entered and removed, both give the same answers, also after reopening."""
    folder = tmp_path_factory.mktemp("model") / "index"
    model = MemoryIndex()
    index = open_index(folder)
    try:
        for step, (verb, entries) in enumerate(steps):
            if verb == "add":
                for each in (model, index):
                    each.add(entries, step)
            elif verb == "remove":
                for each in (model, index):
                    each.remove(entries)
            else:
                index.close()
                index = open_index(folder)
        assert index.was_reset is None
        assert index.stats()._replace(size_bytes=0) == model.stats()
        for name in "abc":
            assert sorted(index.find_id(name)) == sorted(model.find_id(name))
        assert index.has_ids(["c", "x", "a", "b"]) == {name for name in "abc" if model.find_id(name)}
        for topic in "tu":
            assert index.find_idem(topic, "home", "k") == model.find_idem(topic, "home", "k")
        for name in "pqr":
            for backwards in (False, True):
                mine = index.partition(name, since=2, until=9, limit=99, backwards=backwards)
                its = model.partition(name, since=2, until=9, limit=99, backwards=backwards)
                assert seqs(mine) == seqs(its)
                assert sorted(mine) == sorted(its)
    finally:
        index.close()


class TestMemoryIndex:
    """What only the index in memory can do."""

    def test_a_stale_copy_knows_nothing_above_its_seq(self) -> None:
        """A stale copy is the index as it was when it had covered less, and is independent of it."""
        index = MemoryIndex()
        index.add([entry(seq, event_id="same", partitions=(f"p{seq}",)) for seq in (1, 2, 3)], 3)

        stale = index.stale_copy(2)
        index.remove([entry(1, event_id="same", partitions=("p1",))])

        assert stale.covers == 2
        assert seqs(stale.find_id("same")) == [1, 2]
        assert stale.partition("p3", since=0, until=None, limit=9) == []
        assert stale.stats().partitions == 2
        assert index.stale_copy(99).covers == 3

    def test_a_snapshot_is_whole_and_independent(self) -> None:
        """A snapshot has everything, and hears of nothing afterwards; a closed index still gives one."""
        index = MemoryIndex()
        index.add([entry(1, event_id="a"), entry(2, event_id="b")], 1)
        index.close()

        copy = index.snapshot()

        assert copy.covers == 1
        assert seqs(copy.find_id("b")) == [2]


class TestFiles:
    """What holds for the index on disk: it survives, or it is begun anew."""

    def test_reopening_gives_back_everything(self, folder: Path) -> None:
        """What was added is there after reopening, and topics met later get numbers of their own."""
        first = open_index(folder)
        first.add([entry(1, event_id="a", idem_key="k", partitions=("p",)), entry(2, topic="t2", event_id="b")], 2)
        first.close()

        second = open_index(folder)
        second.add([entry(3, topic="t3", offset=0, event_id="c")], 3)
        second.close()
        third = open_index(folder)

        assert third.was_reset is None
        assert third.covers == 3
        assert third.find_id("a") == third.find_idem("demo", "home", "k") == [RecordLocation(1, "demo", 0)]
        assert third.find_id("b") == [RecordLocation(2, "t2", 1)]
        assert third.find_id("c") == [RecordLocation(3, "t3", 0)]
        assert third.stats().size_bytes > 0
        third.close()

    def test_an_index_of_another_epoch_is_begun_anew(self, folder: Path) -> None:
        """Seqs of another life of the log mean nothing, so its index is not used, and that is said."""
        old = open_index(folder, epoch="e1")
        old.add([entry(1, event_id="a")], 1)
        old.close()

        new = open_index(folder, epoch="e2")

        assert new.was_reset is not None
        assert "e1" in new.was_reset
        assert (new.covers, new.find_id("a")) == (0, [])
        new.add([entry(1, event_id="z")], 1)
        new.close()
        again = open_index(folder, epoch="e2")
        assert (again.was_reset, again.covers) == (None, 1)
        again.close()

    def test_an_index_of_another_format_is_begun_anew(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A format this version does not write is not read either."""
        with monkeypatch.context() as newer:
            newer.setattr(lmdb_tables, "_FORMAT", b"2")
            index = open_index(folder)
            index.add([entry(1, event_id="a")], 1)
            index.close()

        index = open_index(folder)

        assert index.was_reset is not None
        assert "format" in index.was_reset
        assert index.covers == 0
        index.close()

    @pytest.mark.parametrize(
        "content",
        [b"x", b"garbage" * 5000, bytes(16384), random.Random(3).randbytes(100_000)],
        ids=["short", "text", "zeros", "random"],
    )
    def test_a_file_that_is_not_an_index_is_replaced(self, folder: Path, content: bytes) -> None:
        """Garbage where the index should be is no error: a new index is begun, and says why."""
        folder.mkdir()
        (folder / "data.mdb").write_bytes(content)

        index = open_index(folder)

        assert index.was_reset is not None
        index.add([entry(1, event_id="a")], 1)
        assert seqs(index.find_id("a")) == [1]
        index.close()

    @pytest.mark.parametrize("kind", ["file", "folder in place of data", "dangling link"])
    def test_whatever_stands_in_its_place_is_replaced(self, folder: Path, kind: str) -> None:
        """Something else under the index's name is set aside as well."""
        if kind == "file":
            folder.write_bytes(b"not a folder")
        elif kind == "dangling link":
            folder.symlink_to(folder.parent / "nowhere")
        else:
            (folder / "data.mdb").mkdir(parents=True)

        index = open_index(folder)

        assert index.was_reset is not None
        index.add([entry(1, event_id="a")], 1)
        assert seqs(index.find_id("a")) == [1]
        index.close()
        assert sorted(path.name for path in folder.parent.iterdir()) == [folder.name]

    def test_an_lmdb_file_of_someone_else_is_replaced(self, folder: Path) -> None:
        """A sound LMDB environment that holds other databases is not taken for an index."""
        env = lmdb.open(str(folder), max_dbs=2)
        env.open_db(b"theirs")
        env.close()

        index = open_index(folder)

        assert index.was_reset is not None
        assert index.covers == 0
        index.close()

    @pytest.mark.parametrize("keep", [4096, 8192, 12288, 40_000, -4096, -1])
    def test_a_file_that_was_cut_off_is_begun_anew(self, folder: Path, keep: int) -> None:
        """A file with its end missing is noticed when opening, not by a crash when reading."""
        index = open_index(folder)
        index.add([entry(seq, event_id=f"e{seq}") for seq in range(1, 5001)], 5000)
        index.close()
        data = folder / "data.mdb"
        size = data.stat().st_size
        os.truncate(data, keep if keep > 0 else size + keep)

        index = open_index(folder)

        assert index.was_reset is not None
        assert index.covers == 0
        index.close()

    def test_removing_never_makes_a_file_look_cut_off(self, folder: Path) -> None:
        """However entries come and go, the file that is left is taken up again and holds what it should."""
        drawn = random.Random(11)
        live: list[IndexEntry] = []
        seq = 0
        for _ in range(40):
            index = open_index(folder)
            assert index.was_reset is None
            fresh = [entry(seq + n, event_id=f"e{seq + n}") for n in range(1, drawn.choice((2, 100, 2000)))]
            seq += len(fresh)
            index.add(fresh, seq)
            live += fresh
            drawn.shuffle(live)
            gone = drawn.choice((1, len(live) // 2, len(live)))
            index.remove(live[:gone])
            del live[:gone]
            assert index.stats().entries == len(live)
            index.close()

    def test_deleting_the_folder_starts_from_nothing(self, folder: Path) -> None:
        """An operator may delete the index; the next open makes a new one without a complaint."""
        index = open_index(folder)
        index.add([entry(1, event_id="a")], 1)
        index.close()
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()

        index = open_index(folder)

        assert (index.was_reset, index.covers) == (None, 0)
        index.close()

    @pytest.mark.parametrize("damage", ["a topic without a name", "a count that is none"])
    def test_damage_met_in_use_has_a_type_and_a_way_out(self, folder: Path, damage: str) -> None:
        """An index found damaged in use says so with its own error, and a reset makes it usable again."""
        index = open_index(folder)
        index.add([entry(1, event_id="a", partitions=("p",))], 1)
        index.close()
        env = lmdb.open(str(folder), max_dbs=5)
        with env.begin(write=True) as txn:
            if damage == "a topic without a name":
                txn.drop(env.open_db(b"topics", txn), delete=False)
            else:
                txn.put(b"partitions", b"many", db=env.open_db(b"meta", txn))
        env.close()
        index = open_index(folder)
        assert index.was_reset is None

        def use() -> None:
            index.find_id("a")
            index.add([entry(2, partitions=("q",))], 2)

        with pytest.raises(IndexDamaged):
            use()
        index.reset()

        assert (index.covers, index.find_id("a")) == (0, [])
        index.add([entry(1, event_id="a")], 1)
        assert seqs(index.find_id("a")) == [1]
        index.close()

    def test_the_map_grows_with_the_entries(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A batch too large for the map makes it grow, while others read; nothing is lost."""
        monkeypatch.setattr(lmdb_index, "_MAP_BYTES_START", MIB)
        index = open_index(folder)
        index.add([entry(1, event_id="e1")], 1)
        done = threading.Event()
        problems: list[object] = []

        def ask() -> None:
            while not done.wait(0.0005):  # without a pause, two readers would leave the writer no turn
                answers = [seqs(index.find_id("e1")) for _ in range(20)]
                problems.extend(answer for answer in answers if answer != [1])

        readers = [threading.Thread(target=ask) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for first in (2, 20_002):
                last = first + 19_999
                index.add([entry(seq, event_id=f"e{seq}") for seq in range(first, last + 1)], last)
        finally:
            done.set()
            for reader in readers:
                reader.join(timeout=60)

        assert problems == []
        assert index.stats().size_bytes > 2 * MIB
        assert all(seqs(index.find_id(f"e{seq}")) == [seq] for seq in range(1, 40_002, 997))
        index.close()

    def test_the_map_does_not_move_under_a_reader(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """A reader in the middle of an answer finishes it before the map grows."""
        monkeypatch.setattr(lmdb_index, "_MAP_BYTES_START", MIB)
        index = open_index(folder)
        index.add([entry(seq, event_id=f"e{seq}", partitions=("p",)) for seq in range(1, 4)], 3)
        is_reading, may_go_on = threading.Event(), threading.Event()
        answers: list[list[int]] = []
        places = lmdb_tables.LmdbStore.places

        def slow_places(
            store: lmdb_tables.LmdbStore, txn: lmdb.Transaction[bytes], values: list[bytes]
        ) -> list[RecordLocation]:
            is_reading.set()
            assert may_go_on.wait(timeout=30)
            return places(store, txn, values)

        monkeypatch.setattr(lmdb_tables.LmdbStore, "places", slow_places)
        reader = threading.Thread(
            target=lambda: answers.append(seqs(index.partition("p", since=0, until=None, limit=9)))
        )
        reader.start()
        assert is_reading.wait(timeout=30)
        writer = threading.Thread(
            target=lambda: index.add([entry(seq, event_id=f"e{seq}") for seq in range(4, 40_000)], 39_999)
        )
        writer.start()
        writer.join(timeout=0.5)
        has_waited = writer.is_alive()
        may_go_on.set()
        for thread in (reader, writer):
            thread.join(timeout=30)

        assert has_waited
        assert answers == [[1, 2, 3]]
        assert index.covers == 39_999
        index.close()

    def test_a_full_index_refuses_the_batch_and_keeps_the_rest(self, folder: Path) -> None:
        """At its limit the index takes no more, says what to do, and goes on answering for what it covers."""
        index = open_index(folder, map_bytes_max=MIB)
        index.add([entry(seq, event_id=f"e{seq}") for seq in range(1, 1001)], 1000)
        late = [entry(seq, topic="late", event_id=f"e{seq}", partitions=("p",)) for seq in range(1001, 60_001)]

        with pytest.raises(IndexFull) as caught:
            index.add(late, 60_000)

        assert caught.value.bytes_max == MIB
        assert caught.value.hint is not None
        assert index.covers == 1000
        assert index.partition("p", since=0, until=None, limit=9) == []
        assert all(seqs(index.find_id(f"e{seq}")) == [seq] for seq in range(1, 1001))
        index.close()
        index = open_index(folder, map_bytes_max=MIB)
        assert (index.was_reset, index.covers) == (None, 1000)
        index.close()
        larger = open_index(folder, map_bytes_max=64 * MIB)
        larger.add(late, 60_000)
        assert larger.covers == 60_000
        assert all(
            larger.find_id(f"e{seq}") == [RecordLocation(seq, "late", seq - 1)] for seq in range(1001, 60_001, 97)
        )
        larger.close()

    def test_after_a_batch_that_did_not_fit_a_smaller_one_is_taken(self, folder: Path) -> None:
        """A topic that a refused batch brought along keeps its one number, for what is added afterwards too."""
        index = open_index(folder, map_bytes_max=MIB)
        index.add([entry(1, topic="early", event_id="e1")], 1)
        with pytest.raises(IndexFull):
            index.add([entry(seq, topic="late", event_id=f"e{seq}") for seq in range(2, 60_001)], 60_000)

        index.add([entry(2, topic="late", event_id="e2"), entry(3, topic="later", event_id="e3x")], 3)

        assert index.covers == 3
        for _ in range(2):
            assert index.find_id("e1") == [RecordLocation(1, "early", 0)]
            assert index.find_id("e2") == [RecordLocation(2, "late", 1)]
            assert index.find_id("e3x") == [RecordLocation(3, "later", 2)]
            index.close()
            index = open_index(folder, map_bytes_max=MIB)
            assert index.was_reset is None
        index.close()

    def test_a_refused_small_batch_leaves_nothing(self, folder: Path) -> None:
        """What goes in with one transaction goes in whole or not at all."""
        index = open_index(folder, map_bytes_max=MIB)

        def fill() -> None:
            for first in range(1, 60_001, 1000):
                index.add([entry(seq, event_id=f"e{seq}") for seq in range(first, first + 1000)], first + 999)

        with pytest.raises(IndexFull):
            fill()

        covered = index.covers
        assert covered > 0
        assert seqs(index.find_id(f"e{covered}")) == [covered]
        assert [seq for seq in range(covered + 1, covered + 1001) if index.find_id(f"e{seq}")] == []
        assert index.stats().entries == covered
        index.close()

    def test_the_same_folder_is_not_opened_twice(self, folder: Path) -> None:
        """A second index on the same files in one process is refused, and harms neither the first nor the files."""
        index = open_index(folder)
        index.add([entry(1, event_id="a")], 1)

        for read_only in (False, True):
            with pytest.raises(WorkspaceBusy):
                open_index(folder, read_only=read_only)

        assert seqs(index.find_id("a")) == [1]
        index.close()
        reopened = open_index(folder)
        assert (reopened.was_reset, reopened.covers) == (None, 1)
        reopened.close()

    def test_a_reset_that_fails_half_way_is_finished_by_the_next_add(
        self, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """If no new file can be made just now, the index is empty, not broken, and is made when it can be."""
        index = open_index(folder)
        index.add([entry(1, event_id="a")], 1)

        def no_room(*_args: object, **_options: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with monkeypatch.context() as full:
            full.setattr(Path, "mkdir", no_room)
            with pytest.raises(OSError, match="No space"):
                index.reset()
            assert (index.covers, index.find_id("a"), index.stats().entries) == (0, [], 0)
            with pytest.raises(OSError, match="No space"):
                index.add([entry(1, event_id="b")], 1)

        index.add([entry(1, event_id="b")], 1)
        assert seqs(index.find_id("b")) == [1]
        index.close()


def run(script: str, *args: str) -> subprocess.Popen[str]:
    """A Python process that has this package, entries made from a seq, and lines to and from us."""
    head = (
        "import sys\n"
        "from pathlib import Path\n"
        "from tidings.log.embedded import lmdb_index\n"
        "from tidings.log.embedded.index import IndexEntry\n"
        "from tidings.log.embedded.lmdb_index import LmdbIndex\n"
        "def say(*words): print(*words, flush=True)\n"
        "def made(first, last):\n"
        "    return [IndexEntry(n, 'demo', n - 1, f'e{n}', None, 'home', ('p',)) for n in range(first, last + 1)]\n"
        "path = Path(sys.argv[1])\n"
    )
    return subprocess.Popen(
        [sys.executable, "-c", head + script, *args],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={"PYTHONPATH": os.pathsep.join(sys.path)},
    )


def line(process: subprocess.Popen[str]) -> str:
    assert process.stdout is not None
    return process.stdout.readline().strip()


def tell(process: subprocess.Popen[str], word: str) -> None:
    assert process.stdin is not None
    process.stdin.write(word + "\n")
    process.stdin.flush()


class TestProcesses:
    """What holds when several processes have a part in it."""

    @pytest.mark.crash
    @pytest.mark.slow
    def test_a_killed_writer_leaves_what_it_covers(self, folder: Path) -> None:
        """Wherever the writer is killed, every record up to ``covers`` is found, and ``covers`` is as told."""
        script = (
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28)\n"
            "while True:\n"
            "    last = index.covers + 700\n"
            "    index.add(made(last - 699, last), last)\n"
            "    say(index.covers)\n"
        )
        covered = 0
        for adds in (1, 2, 3, 5, 8, 1, 4, 2):
            with run(script, str(folder)) as writer:
                told = [int(line(writer)) for _ in range(adds)]
                writer.send_signal(signal.SIGKILL)

            index = open_index(folder)
            assert index.was_reset is None
            assert index.covers >= told[-1] > covered
            covered = index.covers
            assert all(seqs(index.find_id(f"e{seq}")) == [seq] for seq in range(1, covered + 1))
            assert seqs(index.partition("p", since=0, until=covered, limit=covered)) == list(range(1, covered + 1))
            assert index.find_id(f"e{covered + 1}") == []
            index.close()

    @pytest.mark.crash
    @pytest.mark.slow
    @pytest.mark.parametrize(
        "transactions", [1, 7, 8, *(pytest.param(count, marks=pytest.mark.heavy) for count in (0, 2, 5))]
    )
    def test_a_large_batch_cut_short_claims_nothing_and_can_be_entered_again(
        self, folder: Path, transactions: int
    ) -> None:
        """Between the transactions of one batch a crash leaves some of its ids, but neither partitions nor a claim."""
        script = (
            "import os\n"
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28)\n"
            "index.add(made(1, 500), 500)\n"
            "left, write = int(sys.argv[2]), LmdbIndex._write\n"
            "def counted(*args):\n"
            "    global left\n"
            "    if not left: os._exit(9)\n"
            "    left -= 1\n"
            "    write(*args)\n"
            "LmdbIndex._write = counted\n"
            "import msgspec\n"
            "replace = msgspec.structs.replace\n"
            "large = [replace(entry, topic='late', idem_key=entry.event_id) for entry in made(501, 10_500)]\n"
            "index.add(large, 10_500)\n"
            "os._exit(0)\n"
        )
        with run(script, str(folder), str(transactions)) as writer:
            is_whole = writer.wait(timeout=60) == 0
        assert is_whole == (transactions == 8)
        covered = 10_500 if is_whole else 500

        index = open_index(folder)

        assert (index.was_reset, index.covers, index.stats().covers) == (None, covered, covered)
        assert seqs(index.partition("p", since=0, until=None, limit=20_000)) == list(range(1, covered + 1))
        assert index.stats().partitions == 1
        assert all(index.find_id(f"e{seq}") == [RecordLocation(seq, "demo", seq - 1)] for seq in range(1, 501))
        late = {seq: [RecordLocation(seq, "late", seq - 1)] for seq in range(501, 10_501)}
        for found in (
            {seq: index.find_id(f"e{seq}") for seq in late},
            {seq: index.find_idem("late", "home", f"e{seq}") for seq in late},
        ):
            there = {seq: places for seq, places in found.items() if places}
            assert there.items() <= late.items()
            assert abs(len(there) - len(late) * transactions / 8) < 300  # the fingerprints decide
        again = [IndexEntry(seq, "late", seq - 1, f"e{seq}", f"e{seq}", "home", ("p",)) for seq in late]
        index.add(again, 10_500)
        assert all(index.find_id(f"e{seq}") == places for seq, places in late.items())
        assert all(index.find_idem("late", "home", f"e{seq}") == places for seq, places in late.items())
        assert seqs(index.partition("p", since=0, until=None, limit=20_000)) == list(range(1, 10_501))
        assert index.covers == 10_500
        assert index.stats()[::2] == (500 * 2 + 10_000 * 3, 10_500)
        index.close()

    def test_another_process_reads_beside_the_writer(self, folder: Path) -> None:
        """A reader sees each commit of the writer, new topics and a replaced file included, and writes nothing."""
        script = (
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28, read_only=True)\n"
            "for word in sys.stdin:\n"
            "    covers = index.covers\n"
            "    named = index.partition('p', since=0, until=None, limit=99)\n"
            "    say(covers, index.find_id(word.strip()), len(named))\n"
        )
        with run(script, str(folder)) as reader:
            tell(reader, "a")
            assert line(reader) == "0 [] 0"  # there is no index yet

            index = open_index(folder)
            index.add([entry(1, event_id="a", partitions=("p",))], 1)
            tell(reader, "a")
            assert line(reader) == f"1 {[RecordLocation(1, 'demo', 0)]} 1"

            index.add([entry(2, topic="later", offset=7, event_id="b", partitions=("p",))], 2)
            tell(reader, "b")
            assert line(reader) == f"2 {[RecordLocation(2, 'later', 7)]} 2"

            index.reset()
            index.add([entry(1, event_id="c")], 1)
            tell(reader, "a")
            assert line(reader) == "1 [] 0"
            tell(reader, "c")
            assert line(reader) == f"1 {[RecordLocation(1, 'demo', 0)]} 0"
            index.close()
            assert reader.stdin is not None
            reader.stdin.close()
            assert reader.wait(timeout=30) == 0

    def test_a_reader_keeps_up_with_a_map_that_grows(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """When the writer's file outgrows the reader's map, the reader enlarges its own and finds everything."""
        monkeypatch.setattr(lmdb_index, "_MAP_BYTES_START", MIB)
        script = (
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28)\n"
            "index.add(made(1, 10), 10)\n"
            "say('small')\n"
            "sys.stdin.readline()\n"
            "index.add(made(11, 60_000), 60_000)\n"
            "say('large')\n"
            "sys.stdin.readline()\n"
        )
        with run(script, str(folder)) as writer:
            assert line(writer) == "small"
            reader = open_index(folder, read_only=True)
            assert (reader.covers, seqs(reader.find_id("e10")), reader.find_id("e11")) == (10, [10], [])

            tell(writer, "on")
            assert line(writer) == "large"

            assert reader.covers == 60_000
            assert all(seqs(reader.find_id(f"e{seq}")) == [seq] for seq in range(1, 60_001, 613))
            assert reader.stats().size_bytes > MIB
            reader.close()
            tell(writer, "done")
            assert writer.wait(timeout=30) == 0

    def test_a_reader_changes_nothing(self, folder: Path) -> None:
        """A reader refuses every change, and an index it cannot use it leaves alone, says why, and is empty."""
        index = open_index(folder, epoch="e1")
        index.add([entry(1, event_id="a")], 1)
        index.close()

        reader = open_index(folder, epoch="e1", read_only=True)
        changes: list[Callable[[], None]] = [
            lambda: reader.add([], 5),
            lambda: reader.remove([]),
            lambda: reader.reset(),
        ]
        for change in changes:
            with pytest.raises(ReadOnlyLog):
                change()
        assert (reader.was_reset, reader.covers, seqs(reader.find_id("a"))) == (None, 1, [1])
        reader.close()

        stranger = open_index(folder, epoch="e2", read_only=True)
        assert stranger.was_reset is not None
        assert (stranger.covers, stranger.find_id("a"), stranger.stats().entries) == (0, [], 0)
        stranger.close()
        index = open_index(folder, epoch="e1")
        assert (index.was_reset, index.covers) == (None, 1)
        index.close()

    def test_a_reader_that_was_killed_does_not_make_the_file_grow(self, folder: Path) -> None:
        """Pages held by a reader that no longer lives are used again."""
        index = open_index(folder)
        index.add([entry(seq, event_id=f"e{seq}") for seq in range(1, 3001)], 3000)
        script = (
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28, read_only=True)\n"
            "held = index._store.env.begin()\n"
            "say('holding')\n"
            "sys.stdin.readline()\n"
        )
        with run(script, str(folder)) as reader:
            assert line(reader) == "holding"
            reader.send_signal(signal.SIGKILL)

        def churn(rounds: int) -> int:
            for _ in range(rounds):
                index.remove([entry(seq, event_id=f"e{seq}") for seq in range(1, 3001)])
                index.add([entry(seq, event_id=f"e{seq}") for seq in range(1, 3001)], 3000)
            return index.stats().size_bytes

        settled = churn(5)
        assert churn(20) <= 1.2 * settled
        index.close()

    @pytest.mark.parametrize("limit_kib", [32, 512], ids=["refused", "cut short"])
    def test_a_disk_that_takes_no_more_is_the_callers_to_see(self, folder: Path, limit_kib: int) -> None:
        """A write that is not taken comes out as ``OSError``; the index keeps what it had and goes on."""
        script = (
            "import resource\n"
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28)\n"
            "index.add(made(1, 1000), 1000)\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))\n"
            "try:\n"
            "    index.add(made(1001, 60_000), 60_000)\n"
            "except OSError as error:\n"
            "    say(error.errno, index.covers, len(index.find_id('e1000')), len(index.find_id('e1001')))\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
            "index.add(made(1001, 60_000), 60_000)\n"
            "say(index.covers, len(index.find_id('e60000')))\n"
        )
        with run(script, str(folder), str(limit_kib * 1024)) as writer:
            assert line(writer) == f"{errno.EFBIG} 1000 1 0"
            assert line(writer) == "60000 1"
            assert writer.wait(timeout=60) == 0
        assert sorted(file.name for file in folder.iterdir()) == ["data.mdb", "lock.mdb"]

    @pytest.mark.parametrize("limit_kib", [0, 2, 6, 66])
    def test_an_index_that_cannot_be_begun_for_want_of_room_says_so(self, folder: Path, limit_kib: int) -> None:
        """Opening on a disk without room is an ``OSError`` too, not a crash, and works when there is room."""
        script = (
            "import resource\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (int(sys.argv[2]), resource.RLIM_INFINITY))\n"
            "try:\n"
            "    index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28)\n"
            "    index.add(made(1, 5000), 5000)\n"
            "except OSError as error:\n"
            "    say(error.errno)\n"
            "    if 'index' in globals(): index.close()\n"
            "resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))\n"
            "index = LmdbIndex.open(path, epoch='e1', map_bytes_max=1 << 28)\n"
            "index.add(made(1, 5000), 5000)\n"
            "say(index.covers, len(index.find_id('e5000')))\n"
        )
        with run(script, str(folder), str(limit_kib * 1024)) as writer:
            assert line(writer) == str(errno.EFBIG)
            assert line(writer) == "5000 1"
            assert writer.wait(timeout=60) == 0


@pytest.mark.bound("log.embedded.index.TOPIC_COUNT_MAX")
@crossed
def test_one_more_topic_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, beyond: Beyond) -> None:
    """As many topics as allowed have a number; each further one is refused, and those with a number go on."""
    monkeypatch.setattr(lmdb_tables, "TOPIC_COUNT_MAX", 3)
    index = open_index(folder)
    for number in range(3):
        index.add([entry(number + 1, topic=f"t{number}", event_id=f"e{number}")], number + 1)
    for number in range(3, beyond(3)):
        with pytest.raises(IndexLimit, match="topics"):
            index.add([entry(4, topic=f"t{number}", event_id=f"e{number}")], 4)
    index.add([entry(4, topic="t0", offset=9, event_id="last")], 4)
    assert (len(index.find_id("last")), index.find_id("e3")) == (1, [])
    index.close()
