"""
The sync client: work offline on a local view, and sync when the server can be reached.

    async with SyncClient(url, token=token, client_id="ana-phone", store="ana.db", partitions=["list"]) as client:
        draft = await client.submit(["list"], "set", {"target": "milk", "value": {"count": 2}})
        match await draft.settled():
            case Committed(committed_id): ...
            case Rejected(code, errors): ...
            case Pending(): ...

What it promises:

- ``submit`` returns when the event is on this machine's disk, connection or not, and it is then sent until there is a
  verdict: through crashes of this process, of the server, and of everything between. It is committed at most once.
- Committed events are stored in the server's order, each once, and survive as well.
- A rejected draft goes to quarantine; those behind it go on.
- Nothing grows without bound, and a bound that is reached says so with an error of its own.
"""

from __future__ import annotations

import asyncio
import random
import uuid
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Generic, TypeVar, cast

import msgspec

from tidings.core.clock import SYSTEM_CLOCK, Clock
from tidings.core.names import check_partitions
from tidings.core.settings import checked
from tidings.core.tasks import cancel_and_wait
from tidings.sync.settings import ClientSettings
from tidings.wire.sync_frames import SubmitItem

from .database import Database
from .drafts import Changes, ClientStatus, Draft, LocalEvent, QuarantinedDraft, State, Validator, local_event, make_item
from .errors import ClientClosed, InvalidDraft
from .link import Connector, TokenSource
from .replica import Replica
from .runner import Runner
from .store import ClientStore
from .view import ViewOf, event_list

S = TypeVar("S")

_PROFILES: Final = ("canonical", "compatibility")
_CLOSE_S_MAX: Final = 5.0
_PAGE_EVENTS: Final = 500


class NewEvent(msgspec.Struct, frozen=True):
    """An event to submit together with others."""

    partitions: Sequence[str]
    type: str
    payload: Mapping[str, Any]
    id: str | None = None


class SyncClient(Generic[S]):
    """
    One client of a sync server. An async context manager: it connects in the background from entering to leaving.

    Args:
        url: The server's sync endpoint, ``ws://host:port/sync``.
        token: The token, or a callable (plain or async) that returns a fresh one for each connection. A callable may
            raise ``OSError`` or a ``TidingsError``; the client then tries again later.
        client_id: Who this is, as the token says. No two clients that run at the same time may share it.
        store: The path of the local store, made if it is not there; or a ``ClientStore``.
        partitions: What to follow. Events may be submitted to others too.
        view: How events make up ``client.view``; the tuple of all events unless given.
        validate: A check of one's own for drafts: what it objects to is neither stored nor sent.
        settings: Bounds and times.
        connector: Opens connections; WebSockets unless given.
        clock, rng: Time and randomness.
        supported_profiles, required_profile: Which kinds of events this client speaks.
    """

    def __init__(
        self,
        url: str,
        *,
        token: TokenSource,
        client_id: str,
        store: ClientStore | Path | str,
        partitions: Iterable[str],
        view: ViewOf[S] | None = None,
        validate: Validator | None = None,
        settings: ClientSettings | None = None,
        connector: Connector | None = None,
        clock: Clock = SYSTEM_CLOCK,
        rng: random.Random | None = None,
        supported_profiles: Sequence[str] = _PROFILES,
        required_profile: str | None = None,
    ) -> None:
        self._settings = checked(settings or ClientSettings())
        self._clock = clock
        self._validate = validate
        view_of = cast("ViewOf[S]", event_list()) if view is None else view
        self._replica = Replica(
            store if isinstance(store, ClientStore) else ClientStore(store),
            client_id,
            partitions,
            view_of,
            self._settings,
            clock,
        )
        if connector is None:
            from .websocket import WebSocketConnector  # only who needs it loads it

            connector = WebSocketConnector(messages_max=self._settings.inbound_messages_max)
        self._runner = Runner(
            self._replica,
            connector,
            url,
            token,
            self._settings,
            clock,
            rng or random.Random(),
            supported_profiles,
            required_profile,
        )
        self._running: asyncio.Task[None] | None = None
        self._was_entered = False
        self._waiting: list[asyncio.Future[None]] = []

    async def __aenter__(self) -> SyncClient[S]:
        """
        Open the local store and begin to connect. A client is entered once; make another one to come back.

        Raises:
            ClientClosed: It was entered before.
            StoreBusy, StoreMismatch, StoreUnusable: The store cannot be opened.
        """
        if self._was_entered:
            raise ClientClosed
        self._was_entered = True
        try:
            await self._replica.open()
        except BaseException:
            await self._replica.store.close()
            raise
        self._replica.drafts_added = self._drafts_added
        self._runner.changed = self._wake_waiting
        self._running = asyncio.create_task(self._runner.run(), name="tidings-client")
        return self

    async def __aexit__(self, *exc: object) -> None:
        """Disconnect and close the store. Drafts without a verdict stay, for the next client on the same store."""
        running, self._running = self._running, None
        assert running is not None
        self._runner.leave()
        done, _ = await asyncio.wait({running}, timeout=_CLOSE_S_MAX)
        if not done:
            await cancel_and_wait(running)
        await self._replica.close()
        self._wake_waiting()
        if not running.cancelled() and (failure := running.exception()) is not None:
            raise failure  # a bug of ours or of the user's reducer; what is stored is safe

    # Submitting

    async def submit(
        self, partitions: Iterable[str], type: str, payload: Mapping[str, Any], *, id: str | None = None
    ) -> Draft:
        """
        Store an event here, and send it as soon as the server can be reached.

        Args:
            partitions: Where it belongs; every client that follows one of them gets it.
            type: The event's type, as the server's profile has it.
            payload: The event's content, as JSON can hold it.
            id: The event's own id; a new one is made unless given. Submitting the same event with the same id again
                changes nothing, and gives the same draft.

        Raises:
            InvalidDraft: It could never be committed; nothing of it was kept.
            DraftQueueFull: Too many drafts wait.
        """
        (draft,) = await self.submit_many([NewEvent(tuple(partitions), type, payload, id)])
        return draft

    async def submit_many(self, events: Sequence[NewEvent]) -> list[Draft]:
        """
        Store events here, all or none, and send them in this order. Their verdicts are independent of each other.

        Raises:
            InvalidDraft: One of them could never be committed.
            DraftQueueFull: Too many drafts wait.
        """
        self._check_open()
        return await self._replica.add([self._item(event) for event in events])

    async def submit_fact(
        self, partitions: Iterable[str], schema: str, data: Any, *, meta: Mapping[str, Any] | None = None
    ) -> Draft:
        """``submit`` for the canonical profile: data that a registered schema describes."""
        payload: dict[str, Any] = {"schema": schema, "data": data}
        if meta is not None:
            payload["meta"] = meta
        return await self.submit(partitions, "event", payload)

    def _item(self, event: NewEvent) -> SubmitItem:
        item = make_item(
            event.id or str(uuid.uuid4()),
            event.partitions,
            event.type,
            event.payload,
            bytes_max=self._settings.batch_bytes_max // 2,
        )
        if self._validate is not None and (errors := self._validate(local_event(item, self._replica.client_id))):
            raise InvalidDraft(errors)
        return item

    async def draft(self, id: str) -> Draft | None:
        """The event with this id as a draft, whatever became of it; ``None`` if it is not here."""
        self._check_open()
        return await self._replica.draft(id)

    async def quarantine(self) -> list[QuarantinedDraft]:
        """Drafts that were rejected, oldest first, each with the reason."""
        self._check_open()
        return await self._replica.quarantine()

    async def release(self, id: str) -> Draft | None:
        """Send a rejected draft again, as it is; ``None`` if it is not in quarantine."""
        self._check_open()
        return await self._replica.release(id)

    async def discard(self, id: str) -> bool:
        """Forget a rejected draft; says whether there was one."""
        self._check_open()
        return await self._replica.discard(id)

    # Reading

    @property
    def view(self) -> S:
        """The state with every committed event known here, and every draft on top."""
        return self._replica.view.state

    @property
    def confirmed_view(self) -> S:
        """The state without the drafts."""
        return self._replica.view.confirmed

    def changes(self) -> Changes:
        """What happens from now on: an async iterator of ``Change``."""
        self._check_open()
        return self._replica.feed.listen()

    async def events(
        self, *, since: int = 0, until: int | None = None, partitions: Iterable[str] | None = None
    ) -> AsyncIterator[LocalEvent]:
        """Committed events stored here, after ``since`` and up to ``until``, in the server's order."""
        names = None if partitions is None else check_partitions(partitions)
        while True:
            self._check_open()
            page = await self._replica.store.call(
                Database.events, since=since, until=until, partitions=names, limit=_PAGE_EVENTS
            )
            for event in page:
                yield event
                since = event.committed_id or since
            if len(page) < _PAGE_EVENTS:
                return

    async def orphans(self) -> list[LocalEvent]:
        """
        Events that were committed once and are not in the server's history any more (up to 1000 of them).

        They are left after a history reset. ``submit`` with the id of one brings it back.
        """
        self._check_open()
        return await self._replica.store.call(Database.orphans)

    @property
    def status(self) -> ClientStatus:
        """How the client is doing."""
        runner, replica = self._runner, self._replica
        return ClientStatus(
            state=runner.state,
            pending_count=replica.pending_count,
            quarantined_count=replica.quarantined_count,
            orphan_count=replica.orphan_count,
            caught_up_to=runner.caught_up_to,
            refused_partitions=frozenset(runner.refused_partitions),
            attempts=runner.attempts,
            problem=runner.problem,
        )

    # Waiting and steering

    async def caught_up(self) -> None:
        """
        Wait until the client is live: everything committed before is stored here.

        Raises:
            ClientStopped: It will not get there; says why.
        """
        await self._until(lambda: self._runner.state is State.LIVE)

    async def drained(self) -> None:
        """
        Wait until every draft has its verdict.

        Raises:
            ClientStopped: They will not get one from this client; says why.
        """
        await self._until(lambda: self._replica.pending_count == 0)

    async def view_when(self, is_so: Callable[[S], bool]) -> S:
        """
        Wait until the view is as wanted, and return it. ``is_so`` is asked again after every change.

        Raises:
            ClientStopped: Nothing more will come from the server; says why.
        """
        await self._until(lambda: is_so(self.view))
        return self.view

    async def follow(self, partitions: Iterable[str]) -> None:
        """
        Follow exactly these partitions from now on; the history of new ones is fetched, that of others stays.

        Returns when that is stored and, with a connection, under way.
        """
        self._check_open()
        await self._runner.follow(partitions)

    async def prune(self) -> int:
        """Keep a snapshot of the view in place of the events that it covers; returns how many went."""
        self._check_open()
        return await self._replica.prune()

    def connect_now(self) -> None:
        """Do not wait for the next attempt: the network is back."""
        self._runner.hurry()

    async def _until(self, is_so: Callable[[], bool]) -> None:
        while not is_so():
            self._check_open()
            if self._runner.stopped is not None:
                raise self._runner.stopped
            changed = asyncio.get_running_loop().create_future()
            self._waiting.append(changed)
            await changed

    def _drafts_added(self) -> None:
        self._runner.wake()
        self._wake_waiting()

    def _wake_waiting(self) -> None:
        waiting, self._waiting = self._waiting, []
        for future in waiting:
            if not future.done():
                future.set_result(None)

    def _check_open(self) -> None:
        if self._running is None:
            raise ClientClosed
