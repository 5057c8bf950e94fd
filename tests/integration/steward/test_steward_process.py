"""The steward's socket of a real process, spoken to by a client that knows only the description of the wire."""

from __future__ import annotations

import base64
import signal
import struct
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.integration.cli.support import Process, started
from tests.integration.steward.raw_client import RawClient
from tidings.happenings.happening import static_labels, variants

CATALOGUE = """
schema_version = 1

[[racks]]
name = "audio"
charter = "plays sound"
[[racks.shelves]]
name = "playback"
shape = 1
description = "what plays"

[[subjects]]
name = "track"
[[subjects]]
name = "album"

[[relation]]
predicate = "album_of"
source_type = "track"
target_type = "album"
source_cardinality = "at_most_one"
"""
PLUGIN = "org.example.player"


class Steward:
    """A node's process and where its socket is."""

    def __init__(self, process: Process, path: Path) -> None:
        self.process = process
        self.path = path

    def connect(self, *capabilities: str) -> RawClient:
        client = RawClient(self.path)
        if capabilities:
            assert client.ask("negotiate", capabilities=list(capabilities)) == {
                "ok": True,
                "granted": list(capabilities),
            }
        return client


def serve(folder: Path) -> list[object]:
    """The command line of a node with a steward socket."""
    (folder / "catalogue.toml").write_text(CATALOGUE)
    config = folder / "node.toml"
    config.write_text(
        "[server]\nport = 0\nstop_deadline_s = 5\n[log]\njournal_bytes = 1048576\n"
        f'[access.tokens]\nsecret = "a secret of at least thirty-two bytes!"\n'
        f'[ledger]\ncatalogue_file = "{folder / "catalogue.toml"}"\n'
    )
    workspace, path = folder / "workspace", folder / "steward.sock"
    return ["serve", "--config", config, "-w", workspace, "--steward-socket", path, "--json"]


@pytest.fixture(scope="module")
def steward(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steward]:
    folder = tmp_path_factory.mktemp("steward")
    with started(*serve(folder)) as process:
        assert process.json()["url"]
        yield Steward(process, folder / "steward.sock")


def announce(client: RawClient, subject_type: str, value: str, plugin: str = PLUGIN) -> str:
    answer = client.ask(
        "announce_subject", plugin=plugin, subject_type=subject_type, addressings=[{"scheme": "id", "value": value}]
    )
    assert answer["announced"] == "created", answer
    canonical_id: str = answer["canonical_id"]
    return canonical_id


def named(value: str) -> dict[str, str]:
    return {"scheme": "id", "value": value}


def kind_of(answer: dict[str, Any]) -> tuple[str, str | None]:
    """Class and subclass of a refusal."""
    error = answer["error"]
    return error["class"], error.get("details", {}).get("subclass")


@pytest.mark.req("H68")
@pytest.mark.req("H70")
def test_requests_are_answered_one_after_another_and_refusals_leave_the_connection_open(steward: Steward) -> None:
    """Each request has one answer, in order; what is no request is a structured refusal that names its class."""
    with steward.connect() as client:
        client.send({"op": "list_plugins"})
        client.send({"op": "no_such_op"})
        client.send({"op": "describe_capabilities", "extra": 1})
        client.send_bytes(struct.pack(">I", 3) + b"{x}")
        client.send({"op": "project_rack", "rack": "nowhere"})
        client.send({"op": "project_rack", "rack": "audio"})
        answers = [client.receive() for _ in range(6)]

    assert answers[0]["plugins_inventory"] is True
    assert [kind_of(answer) for answer in answers[1:4]] == [("protocol_violation", "invalid_json")] * 3
    assert "extra" in answers[2]["error"]["message"]
    assert kind_of(answers[4]) == ("not_found", "unknown_rack")
    assert answers[5] == {
        "rack_projection": True,
        "rack": "audio",
        "charter": "plays sound",
        "current_seq": answers[5]["current_seq"],
        "shelves": [
            {
                "name": "playback",
                "fully_qualified": "audio.playback",
                "shape": 1,
                "description": "what plays",
                "occupant": None,
            }
        ],
    }


@pytest.mark.req("H65")
def test_capabilities_list_operations_features_and_labels(steward: Steward) -> None:
    """What there is to ask for is listed, with the labels of every variant."""
    with steward.connect() as client:
        found = client.ask("describe_capabilities")
    assert list(found)[:8] == [
        "capabilities",
        "wire_version",
        "ops",
        "features",
        "catalogue_source",
        "clock_trust",
        "has_battery_rtc",
        "coalesce_labels",
    ]
    assert (found["capabilities"], found["wire_version"], found["catalogue_source"]) == (True, 1, "configured")
    assert found["ops"][:14] == [
        *("request", "project_subject", "project_rack", "list_plugins", "describe_alias", "list_active_custodies"),
        *("list_subjects", "list_relations", "enumerate_addressings", "subscribe_happenings", "subscribe_subject"),
        *("describe_capabilities", "negotiate", "resolve_claimants"),
    ]
    assert "subscribe_happenings_cursor" in found["features"]
    assert found["coalesce_labels"]["plugin_event"] == ["variant", "plugin", "event_type"]
    assert found["coalesce_labels"]["custody_taken"] == ["variant", "plugin", "handle_id", "shelf", "custody_type"]
    ours = [name for name, variant in variants().items() if variant.__module__.startswith("tidings.")]
    assert found["coalesce_labels"] == {name: list(static_labels(name)) for name in ours}


def test_an_operation_that_takes_a_capability_is_refused_until_it_was_negotiated(steward: Steward) -> None:
    """Unknown names are passed over, a second negotiation replaces the first, and what was not granted is refused."""
    with steward.connect() as client:
        assert kind_of(client.ask("list_admin_entries")) == ("permission_denied", "ledger_admin_not_granted")
        asked = ["ledger_admin", "no_such", "ledger_admin"]
        assert client.ask("negotiate", capabilities=asked) == {"ok": True, "granted": ["ledger_admin"]}
        assert "admin_entries" in client.ask("list_admin_entries")
        assert client.ask("negotiate", capabilities=[]) == {"ok": True, "granted": []}
        assert kind_of(client.ask("list_admin_entries")) == ("permission_denied", "ledger_admin_not_granted")
        assert kind_of(client.ask("resolve_claimants", tokens=[])) == (
            "permission_denied",
            "resolve_claimants_not_granted",
        )


def test_subjects_and_relations_are_listed_in_pages_and_projected(steward: Steward) -> None:
    """Pages give each subject once, pinned to a seq; a projection shows its relations; aliases lead on after a merge."""
    with steward.connect("plugins", "ledger_admin") as client:
        tracks = {announce(client, "track", f"page-{number}") for number in range(3)}
        album = announce(client, "album", "page-album")
        claim = {"plugin": PLUGIN, "predicate": "album_of", "target": album}
        assert client.ask("claim_relation", source=named("page-0"), **claim) == {
            "done": "claim_relation",
            "result": "created",
        }
        found, cursor = set(), None
        while True:
            page = client.ask("list_subjects", page_size=2, **({} if cursor is None else {"cursor": cursor}))
            assert list(page) == ["subjects", "next_cursor", "current_seq"]
            found |= {each["canonical_id"] for each in page["subjects"]}
            cursor = page["next_cursor"]
            if cursor is None:
                break
        assert tracks | {album} <= found
        assert kind_of(client.ask("list_subjects", cursor="!")) == ("contract_violation", "invalid_page_cursor")

        [relation] = [each for each in client.ask("list_relations")["relations"] if each["target_id"] == album]
        source = relation["source_id"]
        assert relation == {
            "source_id": source,
            "predicate": "album_of",
            "target_id": album,
            "claimants": [PLUGIN],
            "suppressed": False,
        }
        scope = {"relation_predicates": ["album_of"]}
        shown = client.ask("project_subject", canonical_id=source, scope=scope)
        assert shown.get("canonical_id") == source, shown
        assert shown["addressings"] == [{"scheme": "id", "value": "page-0", "claimant": PLUGIN}]
        [related] = shown["related"]
        assert (related["predicate"], related["target_id"], related["target_type"]) == ("album_of", album, "album")

        new_id = client.ask("merge_subjects", a=named("page-0"), b=named("page-1"))["result"]["new_id"]
        aliased = client.ask("project_subject", canonical_id=source)
        assert aliased["subject"]["canonical_id"] == new_id
        assert aliased["aliased_from"]["terminal_id"] == new_id
        assert [each["kind"] for each in aliased["aliased_from"]["chain"]] == ["merged"]
        unfollowed = client.ask("project_subject", canonical_id=source, follow_aliases=False)
        assert (unfollowed["subject"], unfollowed["aliased_from"]["terminal_id"]) == (None, new_id)
        alias = client.ask("describe_alias", subject_id=source)
        assert (alias["ok"], alias["subject_id"], alias["result"]["kind"]) == (True, source, "aliased")
        assert alias["result"]["terminal"]["canonical_id"] == new_id
        single = client.ask("describe_alias", subject_id=source, include_chain=False)["result"]
        assert (len(single["chain"]), single["terminal"]) == (1, None)
        assert client.ask("describe_alias", subject_id="nobody")["result"] == {"kind": "not_found"}
        assert kind_of(client.ask("project_subject", canonical_id="nobody")) == ("not_found", "unknown_subject")
        assert kind_of(client.ask("merge_subjects", a=new_id, b=new_id)) == ("contract_violation", "merge_self_target")


def test_flight_mode_is_told_and_can_be_asked_for(steward: Steward) -> None:
    """A class of radios that a plugin switched is told once, and the state is there for who comes later."""
    shelf = "flight_mode.wireless.bluetooth"
    with steward.connect("plugins") as client, steward.connect() as subscriber:
        subscriber.ask("subscribe_happenings", filter={"variants": ["flight_mode_changed"]})
        switch = {"plugin": "org.example.radio", "shelf": shelf}
        assert client.ask("set_flight_mode", **switch, on=True) == {"done": "set_flight_mode", "result": True}
        assert client.ask("set_flight_mode", **switch, on=True)["result"] is False
        client.ask("set_flight_mode", **switch, on=False)
        heard = [subscriber.receive()["happening"] for _ in range(2)]
        assert [(each["rack_class"], each["on"]) for each in heard] == [(shelf, True), (shelf, False)]
        assert client.ask("list_flight_modes")["flight_modes"] == {shelf: False}


def test_a_conflict_is_listed_until_it_is_settled_and_the_claim_log_has_both(steward: Steward) -> None:
    """An announcement that names two subjects attaches nothing; a merge settles it; claims that came along are kept."""
    with steward.connect("plugins", "ledger_admin") as client:
        ids = {announce(client, "track", "both-1"), announce(client, "track", "both-2")}
        both = [named("both-1"), named("both-2")]
        claims = [{"kind": "equivalent", "a": both[0], "b": both[1], "confidence": "inferred"}]
        answer = client.ask("announce_subject", plugin=PLUGIN, subject_type="track", addressings=both, claims=claims)
        assert (answer["announced"], answer["canonical_id"], set(answer["conflicting_ids"])) == ("conflict", None, ids)
        [conflict] = client.ask("list_conflicts")["conflicts"]
        assert (conflict["plugin"], set(conflict["canonical_ids"])) == (PLUGIN, ids)
        assert conflict["addressings"] == both
        client.ask("merge_subjects", a=both[0], b=both[1])
        assert client.ask("list_conflicts")["conflicts"] == []
        log, after = [], 0
        while after is not None:
            page = client.ask("list_claims", page_size=1, after=after)
            log += page["claims"]
            after = page["next_after"]
        kinds = sorted(each["claim"]["kind"] for each in log[-3:])
        assert kinds == ["equivalent", "multi_subject_conflict", "replaced"]
        assert claims[0] in [each["claim"] for each in log]


@pytest.mark.req("H12")
@pytest.mark.req("H69")
def test_a_subscriber_gets_the_acknowledgement_then_what_it_missed_then_what_happens(steward: Steward) -> None:
    """The cursor of the acknowledgement is the newest seq; frames are one happening each, without gap or repeat."""
    with steward.connect("plugins") as client, steward.connect() as first, steward.connect() as second:
        at = first.ask("subscribe_happenings")
        assert list(at) == ["subscribed", "current_seq"]
        for number in range(3):
            client.ask("report_event", plugin=PLUGIN, event_type="tick", payload={"n": number})
        live = [first.receive() for _ in range(3)]
        assert [frame["seq"] for frame in live] == [at["current_seq"] + number for number in (1, 2, 3)]
        assert [list(frame) for frame in live] == [["seq", "happening"]] * 3
        happening = dict(live[0]["happening"])
        assert isinstance(happening.pop("at_ms"), int)
        assert happening == {"type": "plugin_event", "plugin": PLUGIN, "event_type": "tick", "payload": {"n": 0}}

        ack = second.ask("subscribe_happenings", since=at["current_seq"] + 1)
        assert ack == {"subscribed": True, "current_seq": at["current_seq"] + 3}
        client.ask("report_event", plugin=PLUGIN, event_type="tick", payload={"n": 3})
        assert [second.receive() for _ in range(3)] == [*live[1:], first.receive()]
        first.send({"op": "list_plugins"})  # passed over: from the acknowledgement on only the server speaks
        client.ask("report_event", plugin=PLUGIN, event_type="tick", payload={"n": 4})
        assert first.receive()["happening"]["payload"] == {"n": 4}


@pytest.mark.req("H58")
@pytest.mark.req("H59")
def test_a_filter_narrows_both_replay_and_live_and_one_that_is_none_is_refused(steward: Steward) -> None:
    """A misspelt dimension is named and refused, and the connection stays; a good one lets through what it says."""
    with steward.connect("plugins") as client, steward.connect() as subscriber:
        since = client.ask("list_plugins")["current_seq"]
        client.ask("report_event", plugin="org.example.a", event_type="x")
        client.ask("report_event", plugin="org.example.b", event_type="x")
        refused = subscriber.ask("subscribe_happenings", filter={"plugin": ["org.example.b"]})
        assert kind_of(refused) == ("protocol_violation", "invalid_json")
        assert "plugin" in refused["error"]["message"]
        wanted = {"plugins": ["org.example.b"], "variants": ["plugin_event"]}
        assert subscriber.ask("subscribe_happenings", since=since, filter=wanted)["subscribed"]
        client.ask("report_event", plugin="org.example.a", event_type="y")
        client.ask("report_event", plugin="org.example.b", event_type="y")
        heard = [subscriber.receive()["happening"] for _ in range(2)]
        assert [(each["plugin"], each["event_type"]) for each in heard] == [
            ("org.example.b", "x"),
            ("org.example.b", "y"),
        ]


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({"coalesce_labels": []}, ("contract_violation", "coalesce_invalid")),
        ({"coalesce_window_ms": 5}, ("contract_violation", "coalesce_invalid")),
        (
            {"coalesce": {"labels": ["variant"]}, "coalesce_labels": ["variant"]},
            ("contract_violation", "coalesce_invalid"),
        ),
        ({"since": 0, "epoch": "another"}, ("contract_violation", "epoch_mismatch")),
    ],
)
def test_a_subscription_that_cannot_be_had_is_refused_once_and_the_connection_ends(
    steward: Steward, fields: dict[str, Any], kind: tuple[str, str]
) -> None:
    """Bad coalescing and a cursor of another epoch: one error frame, no acknowledgement, the end."""
    with steward.connect() as client:
        assert kind_of(client.ask("subscribe_happenings", **fields)) == kind
        assert client.receive() is None


@pytest.mark.req("H61")
def test_coalescing_gives_the_latest_of_those_alike_with_a_cursor_to_resume_from(steward: Steward) -> None:
    """Of many alike one comes a window, with the highest seq, and ``resume_seq``."""
    with steward.connect("plugins") as client, steward.connect() as subscriber:
        wanted = {"variants": ["plugin_event"], "plugins": ["org.example.fast"]}
        subscriber.ask("subscribe_happenings", filter=wanted, coalesce_labels=["variant"], coalesce_window_ms=300)
        for number in range(20):
            client.ask("report_event", plugin="org.example.fast", event_type="t", payload={"n": number})
        last = client.ask("list_plugins")["current_seq"]
        frames: list[Any] = []
        while not frames or frames[-1]["seq"] < last:
            frames.append(subscriber.receive())
        assert len(frames) < 20
        assert frames[-1]["happening"]["payload"] == {"n": 19}
        assert frames[-1]["resume_seq"] == last


def test_a_subject_is_followed_through_changes_a_merge_and_a_split(steward: Steward) -> None:
    """First the projection with seq 0, one more after each change; a merge leads on, a split ends it and says where to."""
    with steward.connect("plugins", "ledger_admin") as client, steward.connect() as subscriber:
        first, second = announce(client, "track", "follow-1"), announce(client, "track", "follow-2")
        ack = subscriber.ask("subscribe_subject", canonical_id=first)
        assert list(ack) == ["subscribed_subject", "canonical_id", "current_seq"]
        initial = subscriber.receive()
        assert (initial["seq"], initial["canonical_id"]) == (0, first)
        assert initial["projection"]["state"] is None

        client.ask("update_state", plugin=PLUGIN, subject=first, state={"volume": 7})
        changed = subscriber.receive()
        assert changed["seq"] == ack["current_seq"] + 1
        assert changed["projection"]["state"] == {"volume": 7}

        merged = client.ask("merge_subjects", a=first, b=second)["result"]["new_id"]
        moved = subscriber.receive()
        assert (moved["canonical_id"], moved["projection"]["canonical_id"]) == (merged, merged)
        groups = [[named("follow-1")], [named("follow-2")]]
        parts = client.ask("split_subject", source=merged, partition=groups, strategy="to_both")["result"]["new_ids"]
        last = subscriber.receive()
        assert (last["canonical_id"], last["projection"], last["new_ids"]) == (merged, None, parts)
        assert subscriber.receive() is None

    with steward.connect() as client:
        assert kind_of(client.ask("subscribe_subject", canonical_id=first)) == ("not_found", "alias_chain_unresolved")
        forked = client.ask("subscribe_subject", canonical_id=first, follow_aliases=True)
        assert kind_of(forked) == ("not_found", "alias_chain_forked")
        assert kind_of(client.ask("subscribe_subject", canonical_id="nobody")) == ("not_found", "unknown_subject")


def test_a_plugin_in_another_process_answers_requests_and_takes_custody(steward: Steward) -> None:
    """Calls reach the plugin over its own connection, and its answers, refusals and reports come back."""
    shelf = "audio.playback"
    with steward.connect("plugins") as plugin, steward.connect() as client:
        loaded = plugin.ask("load_plugin", plugin=PLUGIN, interaction_kind="warden", manifest={"shelves": [shelf]})
        assert loaded == {"plugin_loaded": True, "plugin": PLUGIN, "shelves": [shelf]}

        def play() -> None:
            call = plugin.receive()
            payload = base64.b64decode(call["payload_b64"])
            plugin.send({"op": "answer", "call": call["call"], "payload_b64": base64.b64encode(payload[::-1]).decode()})
            call = plugin.receive()
            error = {"class": "unavailable", "message": "no", "details": {"subclass": "asleep"}}
            plugin.send({"op": "answer", "call": call["call"], "error": error})
            call = plugin.receive()
            assert (call["kind"], call["custody_type"]) == ("take_custody", "playback")
            plugin.send({"op": "answer", "call": call["call"]})
            call = plugin.receive()
            assert (call["kind"], call["correction_type"]) == ("correct_course", "louder")
            plugin.send({"op": "answer", "call": call["call"]})
            call = plugin.receive()
            assert call["kind"] == "release_custody"
            plugin.send({"op": "answer", "call": call["call"]})

        playing = threading.Thread(target=play)
        playing.start()
        ask = {"shelf": shelf, "request_type": "reverse", "payload_b64": base64.b64encode(b"abc").decode()}
        assert client.ask("request", **ask) == {"payload_b64": base64.b64encode(b"cba").decode()}
        assert kind_of(client.ask("request", **ask)) == ("unavailable", "asleep")
        taken = client.ask("take_custody", shelf=shelf, custody_type="playback", payload_b64="")
        assert list(taken) == ["custody", "shelf", "handle"]
        handle = taken["handle"]
        [record] = client.ask("list_active_custodies")["active_custodies"]
        assert record == {
            "plugin": PLUGIN,
            "handle_id": handle["id"],
            "shelf": shelf,
            "custody_type": "playback",
            "last_state": None,
            "state": {"kind": "active"},
            "started_at_ms": handle["started_at"],
            "last_updated_ms": record["last_updated_ms"],
        }
        page = client.ask("list_active_custodies", page_size=1)
        assert list(page) == ["active_custodies", "next_cursor", "current_seq"]
        corrected = client.ask("course_correct", shelf=shelf, handle=handle, correction_type="louder", payload_b64="")
        assert corrected == {"course_corrected": True, "shelf": shelf, "handle_id": handle["id"]}
        released = client.ask("release_custody", shelf=shelf, handle=handle)
        assert released == {"released": True, "shelf": shelf, "handle_id": handle["id"]}
        assert client.ask("list_active_custodies") == {"active_custodies": []}
        playing.join()
        assert kind_of(client.ask("request", shelf=shelf, request_type="x", payload_b64="*")) == (
            "contract_violation",
            "invalid_base64",
        )
        assert client.ask("list_plugins")["plugins"] == [{"name": PLUGIN, "shelf": shelf, "interaction_kind": "warden"}]

        assert kind_of(plugin.ask("subscribe_happenings")) == ("contract_violation", "serves_already")
        client.send({"op": "request", **ask})  # under way when its connection ends
        assert plugin.receive()["kind"] == "request"
        plugin.close()
        assert kind_of(client.receive()) == ("unavailable", "plugin_unloaded")
        assert kind_of(client.ask("request", **ask)) == ("not_found", "shelf_empty")


def test_appointments_are_made_listed_fire_and_are_cancelled(steward: Steward) -> None:
    """An appointment fires into a topic, and is answered in the wire's own forms; the admin ledger has who made it."""
    ids = {"creator": "clock", "appointment_id": "soon"}
    with steward.connect("appointments_admin", "ledger_admin") as client, steward.connect() as subscriber:
        assert subscriber.ask(
            "subscribe_happenings", filter={"variants": ["appointment_fired", "appointment_cancelled"]}
        )
        spec = {
            "appointment_id": "soon",
            "recurrence": {"kind": "one_shot", "fire_at_ms": 1},
            "miss_policy": {"kind": "catchup"},
        }
        action = {"target_shelf": "nowhere.at_all", "request_type": "ring", "payload": {}}
        made = client.ask("create_appointment", creator="clock", spec=spec, action=action)
        assert made == {"appointment_created": True, **ids, "next_fire_ms": 1}
        fired = subscriber.receive()["happening"]
        assert (fired["creator"], fired["dispatch_outcome"]) == ("clock", "not_found/shelf_empty")
        entry = client.ask("project_appointment", **ids)
        assert (entry["appointment_projection"], entry["entry"]["state"], entry["entry"]["fires_completed"]) == (
            True,
            "fired",
            1,
        )

        daily = {"appointment_id": "daily", "time": "06:30", "zone": {"kind": "utc"}, "recurrence": {"kind": "daily"}}
        client.ask("create_appointment", creator="clock", spec=daily, action=action)
        listed = client.ask("list_appointments")
        assert listed["appointments"] is True
        assert [each["spec"]["appointment_id"] for each in listed["entries"]] == ["daily", "soon"]
        cancel = {"creator": "clock", "appointment_id": "daily"}
        assert client.ask("cancel_appointment", **cancel) == {
            "appointment_cancelled": True,
            **cancel,
            "cancelled": True,
        }
        assert client.ask("cancel_appointment", **cancel)["cancelled"] is False
        assert subscriber.receive()["happening"]["cancelled_by"] == "operator"
        assert client.ask("project_appointment", creator="nobody", appointment_id="x")["entry"] is None
        bad = {"appointment_id": "x", "recurrence": {"kind": "weekly", "days": []}, "time": "06:30"}
        refused = client.ask("create_appointment", creator="clock", spec=bad, action=action)
        assert kind_of(refused) == ("contract_violation", "bad_recurrence")
        kinds = [each["kind"] for each in client.ask("list_admin_entries")["admin_entries"]]
        assert kinds.count("appointment_create") == 2
        assert "appointment_cancel" in kinds
    with steward.connect() as client:
        assert kind_of(client.ask("list_appointments")) == ("permission_denied", "appointments_admin_not_granted")


def test_watches_are_made_listed_fire_and_are_cancelled(steward: Steward) -> None:
    """A watch on a plugin's events fires once an event; forms and refusals are the wire's own."""
    ids = {"creator": "guard", "watch_id": "door"}
    with steward.connect("watches_admin", "plugins") as client, steward.connect() as subscriber:
        assert subscriber.ask("subscribe_happenings", filter={"variants": ["watch_fired", "watch_cancelled"]})
        condition = {"kind": "happening_match", "filter": {"plugins": ["org.example.door"]}}
        action = {"target_shelf": "nowhere.at_all", "request_type": "ring", "payload": {}}
        made = client.ask(
            "create_watch", creator="guard", spec={"watch_id": "door", "condition": condition}, action=action
        )
        assert made == {"watch_created": True, **ids}
        client.ask("report_event", plugin="org.example.door", event_type="opened")
        fired = subscriber.receive()["happening"]
        assert (fired["type"], fired["watch_id"], fired["dispatch_outcome"]) == (
            "watch_fired",
            "door",
            "not_found/shelf_empty",
        )
        [entry] = client.ask("list_watches")["entries"]
        assert (entry["creator"], entry["spec"]["watch_id"], entry["fires_completed"]) == ("guard", "door", 1)
        assert client.ask("cancel_watch", **ids) == {"watch_cancelled": True, **ids, "cancelled": True}
        assert client.ask("cancel_watch", **ids)["cancelled"] is False
        assert client.ask("project_watch", creator="nobody", watch_id="x") == {
            "watch_projection": True,
            "creator": "nobody",
            "watch_id": "x",
            "entry": None,
        }
        level = {"watch_id": "x", "condition": condition, "trigger": {"kind": "level", "cooldown_ms": 999}}
        refused = client.ask("create_watch", creator="guard", spec=level, action=action)
        assert kind_of(refused) == ("contract_violation", "bad_spec")


def test_types_that_the_catalogue_lost_are_listed_accepted_and_migrated(steward: Steward) -> None:
    """Without orphans the list is empty, and what is none is refused."""
    with steward.connect("grammar_admin") as client:
        assert client.ask("list_grammar_orphans") == {"grammar_orphans": True, "entries": []}
        accepted = client.ask("accept_grammar_orphans", from_type="nothing", reason="why not")
        assert kind_of(accepted) == ("not_found", "not_found")
        rename = {"kind": "rename", "to_type": "album"}
        migrated = client.ask("migrate_grammar_orphans", from_type="track", strategy=rename)
        assert kind_of(migrated) == ("contract_violation", "not_an_orphan")


def test_another_catalogue_is_used_from_now_on(tmp_path: Path) -> None:
    """Types that it declares may be announced; what it no longer declares is an orphan; one that is no catalogue changes nothing."""
    declared = '[[subjects]]\nname = "{}"\ndescription = "one of them"\n'
    whole = "schema_version = 1\n" + declared.format("track") + declared.format("album") + declared.format("reel")
    with started(*serve(tmp_path)) as process:
        assert process.json()["url"]
        client = Steward(process, tmp_path / "steward.sock").connect("grammar_admin", "plugins", "ledger_admin")
        assert client.ask("set_catalogue", catalogue=whole) == {"done": "set_catalogue", "result": "changed"}
        assert client.ask("set_catalogue", catalogue=whole)["result"] == "no_change"
        reel = {"scheme": "name", "value": "reel-1"}
        assert "error" not in client.ask(
            "announce_subject", plugin="org.reels", subject_type="reel", addressings=[reel]
        )
        refused = client.ask("set_catalogue", catalogue="schema_version = 99")
        assert kind_of(refused)[0] == "misconfiguration"
        without = whole.replace(declared.format("reel"), "")
        assert client.ask("set_catalogue", catalogue=without)["result"] == "changed"
        assert [each["subject_type"] for each in client.ask("list_grammar_orphans")["entries"]] == ["reel"]
        done = client.ask("list_admin_entries")["admin_entries"]
        assert [each["kind"] for each in done if each["kind"] == "catalogue_set"] == ["catalogue_set"] * 2
        client.close()


@pytest.mark.parametrize(
    "data",
    [
        struct.pack(">I", 0),
        struct.pack(">I", (64 << 20) + 1),
        struct.pack(">I", 0xFFFFFFFF),
    ],
    ids=["length 0", "64 MiB + 1", "4 GiB"],
)
def test_a_broken_frame_closes_the_connection_and_no_other(steward: Steward, data: bytes) -> None:
    """Lengths of 0 and of more than 64 MiB end the connection that sent them."""
    with steward.connect() as other, steward.connect() as client:
        client.send_bytes(data)
        assert client.is_ended()
        assert other.ask("list_plugins")["plugins_inventory"]


def test_a_header_that_is_cut_in_half_closes_and_requests_before_a_half_close_are_answered(steward: Steward) -> None:
    """An end between frames is no fault: what was asked before it is answered."""
    import socket as sockets

    with steward.connect() as client:
        client.send_bytes(b"\x00\x00")
        client.socket.shutdown(sockets.SHUT_WR)
        assert client.is_ended()
    with steward.connect() as client:
        client.send({"op": "list_plugins"})
        client.send({"op": "describe_capabilities"})
        client.socket.shutdown(sockets.SHUT_WR)
        assert client.receive()["plugins_inventory"]
        assert client.receive()["capabilities"]
        assert client.receive() is None


def test_what_was_told_survives_the_end_of_the_process(tmp_path: Path) -> None:
    """After SIGTERM and a start the seqs go on, and a cursor from before is good."""
    command = serve(tmp_path)
    with started(*command) as process:
        assert process.json()["url"]
        first = Steward(process, tmp_path / "steward.sock")
        with first.connect("plugins") as client, first.connect() as subscriber:
            since = subscriber.ask("subscribe_happenings")["current_seq"]
            client.ask("report_event", plugin=PLUGIN, event_type="before")
            told = subscriber.receive()
            process.process.send_signal(signal.SIGTERM)
            assert subscriber.receive() is None
        assert process.exit_code() == 0
        assert not (tmp_path / "steward.sock").exists()
    with started(*command) as process:
        assert process.json()["url"]
        second = Steward(process, tmp_path / "steward.sock")
        with second.connect("plugins") as client, second.connect() as subscriber:
            assert subscriber.ask("subscribe_happenings", since=since)["current_seq"] == told["seq"]
            assert subscriber.receive() == told
            client.ask("report_event", plugin=PLUGIN, event_type="after")
            assert subscriber.receive()["seq"] == told["seq"] + 1
