"""A node with a gateway that commits, cuts, forgets and restarts as a test says: the frames and pages of a real one, and nothing else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx

from tidings.client.errors import ConnectFailed
from tidings.client.link import Inbox
from tidings.wire.gateway import (
    LIFE_HEADER,
    AckEvent,
    CloseReason,
    ResumeEvents,
    SubscribedEvents,
    SubscribeEvents,
    decode_from_client,
    error_frame,
    event_prefix,
    event_suffix,
    subscribed_frame,
)


class EagerClock:
    """A clock whose sleepers wake at once: time passes as fast as somebody waits for it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def now_ns(self) -> int:
        return 1_767_225_600_000_000_000 + int(self.now_s * 1e9)

    def monotonic(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        if seconds == 10.0:  # the limit on opening a connection, which is about to happen
            await asyncio.Future()
        self.now_s += max(0.0, seconds)
        await asyncio.sleep(0)


class FakeLink:
    """One connection, the client's side and the node's in one."""

    def __init__(self, node: FakeGateway, life: int) -> None:
        self.node = node
        self.headers = {LIFE_HEADER: str(life)} if node.tells_life else {}
        self.inbox = Inbox(1 << 20, lambda: None, lambda: None)
        self.resume_token: str | None = None
        self.is_subscribed = False
        self.sent: list[str] = []
        self.acked = 0

    @property
    def is_open(self) -> bool:
        return self.inbox.is_open

    def send(self, message: bytes) -> None:
        """What the client says."""
        if not self.is_open:
            return
        frame = decode_from_client(message)
        self.node.frames.append(frame)
        match frame:
            case ResumeEvents():
                self.resume_token = frame.resume_token
            case SubscribeEvents():
                self._subscribe()
            case AckEvent():
                self.acked = self.sent.index(frame.resume_token, self.acked) + 1

    def _subscribe(self) -> None:
        node, missed, is_resumed = self.node, [], False
        since = node.events[-1]["seq"] if node.events else 0
        if self.resume_token is not None:
            at = node.ordinal_of(self.resume_token)
            if at is None or len(node.events) - at - 1 > node.per_connection:
                self.refuse(CloseReason.RESUME_INVALID)
                return
            missed, is_resumed = node.events[at + 1 :], True
        answer = SubscribedEvents(
            connection_id="c",
            heartbeat_interval_ms=15_000,
            per_connection=node.per_connection,
            replayed=len(missed),
            resumed=is_resumed,
            since=since,
        )
        self.is_subscribed = True
        self.inbox.put(subscribed_frame(answer, "t"))
        for event in missed:
            self.offer(event)

    def offer(self, event: dict[str, Any]) -> None:
        """An event for this subscriber."""
        if not self.is_subscribed or not self.is_open:
            return
        if len(self.sent) - self.acked >= self.node.per_connection:
            self.refuse(CloseReason.BUFFER_OVERFLOW)
            return
        envelope = self.node.envelope(event)
        self.sent.append(envelope["resume_token"])
        self.inbox.put(event_prefix("graph.object_mutated", json.dumps(envelope).encode()) + event_suffix("t"))

    def refuse(self, reason: CloseReason) -> None:
        """Close it for a reason."""
        self.inbox.put(error_frame(reason, "because", "t"))
        self.inbox.close(reason.code, reason.reason)

    async def receive(self) -> list[bytes]:
        return await self.inbox.take()

    async def close(self, code: int = 1000, reason: str = "") -> None:
        self.inbox.close(code, reason)


class FakeGateway:
    """
    The node.

    Args:
        per_connection: How many envelopes may wait for an ack.
        window: How many envelopes can be resumed from.
        page: Envelopes on a page; those of a seq stay together.
        tells_life: Whether it says at each connection which life it is in, as nodes do whose answer comes through whole.
    """

    def __init__(self, *, per_connection: int = 16, window: int = 32, page: int = 5, tells_life: bool = True) -> None:
        self.tells_life = tells_life
        self.per_connection, self.window, self.page = per_connection, window, page
        self.events: list[dict[str, Any]] = []
        self.frames: list[object] = []
        self.links: list[FakeLink] = []
        self.tokens: list[str] = []
        self.life = 1
        self.first_of_life = 0
        self.epoch = "e1"
        self.refusals: list[tuple[int, str]] = []
        """Answers to the next requests over HTTP, before any page."""
        self.upgrades: list[int] = []
        """Statuses that the next upgrades are answered with."""
        self.pages = 0
        self.asked = httpx.QueryParams()
        """The last page's parameters."""

    # What happens in the node

    def commit(self, parts: int = 1) -> None:
        """A record that takes so many envelopes. Now and then a seq has none."""
        seq = (self.events[-1]["seq"] if self.events else 0) + (2 if len(self.events) % 3 == 0 else 1)
        for part in range(1, parts + 1):
            event = {"seq": seq, "part": part, "parts": parts}
            self.events.append(event)
            for link in self.links:
                link.offer(event)

    def restart(self, *, is_orderly: bool = True) -> None:
        """Another life: no token of this one counts any more."""
        self.life += 1
        self.first_of_life = len(self.events)
        self.cut(1001 if is_orderly else 1006)

    def cut(self, code: int = 1006) -> None:
        """All connections break."""
        for link in self.links:
            link.inbox.close(code)
        self.links.clear()

    def places(self, since: int = 0) -> list[tuple[int, int]]:
        """What everybody may see, once, in order."""
        return [(each["seq"], each["part"]) for each in self.events if each["seq"] > since]

    # What the client reaches

    async def connect(self, url: str) -> FakeLink:
        if self.upgrades:
            status = self.upgrades.pop(0)
            raise ConnectFailed(url, f"answered {status}", status)
        link = FakeLink(self, self.life)
        self.links.append(link)
        return link

    def connector_for(self, token: str) -> FakeGateway:
        """The connector for a token."""
        self.tokens.append(token)
        return self

    def http(self) -> httpx.MockTransport:
        """What answers ``GET /v1/envelopes``."""
        return httpx.MockTransport(self._page)

    def _page(self, request: httpx.Request) -> httpx.Response:
        self.pages += 1
        if self.refusals:
            status, code = self.refusals.pop(0)
            return httpx.Response(status, json={"code": code, "detail": "no", "retryable": status == 503})
        params = self.asked = request.url.params
        since, until = int(params["since"]), int(params.get("until", 1 << 60))
        wanted = [each for each in self.events if since < each["seq"] <= until]
        seqs = sorted({each["seq"] for each in wanted})
        chosen, at_end = wanted, True
        for cut in seqs:
            upto = [each for each in wanted if each["seq"] <= cut]
            if len(upto) >= self.page and cut != seqs[-1]:
                chosen, at_end = upto, False
                break
        last = chosen[-1]["seq"] if chosen else since
        reached = max(last, min(until, self.events[-1]["seq"] if self.events else 0)) if at_end else last
        body = {
            "envelopes": [self.envelope(each) for each in chosen],
            "next_since": max(since, reached),
            "at_end": at_end,
            "epoch": self.epoch,
        }
        return httpx.Response(200, json=body)

    def envelope(self, event: dict[str, Any]) -> dict[str, Any]:
        """An event as it is told."""
        several = {"part": event["part"], "parts": event["parts"]} if event["parts"] > 1 else {}
        return {
            "audience_contract": "c",
            "emitted_at": 1,
            "event_id": "e",
            "event_type": "graph.object_mutated",
            "payload_summary": {"object_ids": [f"o:{event['seq']}"], **several},
            "resume_token": f"{self.life}/{self.events.index(event)}",
            "scope": {"app_id": "default", "domain_id": "orders"},
            "sequence_anchor": {"global_seq": event["seq"]},
            "source_manager": "graph_manager",
        }

    def ordinal_of(self, token: str) -> int | None:
        """Where a token stands, if it is still good."""
        life, _, at = token.partition("/")
        place = int(at)
        is_kept = place >= max(self.first_of_life, len(self.events) - self.window)
        return place if int(life) == self.life and is_kept else None
