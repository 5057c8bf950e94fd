"""
What the client raises when it cannot do what it was asked.

    ClientError                 the sync client
    ├── ClientClosed            the client was closed, or not entered yet
    ├── ClientStopped           the client gave up connecting; says why, and drafts stay where they are
    ├── InvalidDraft            the event can never be committed as it is; nothing of it was kept
    ├── DraftQueueFull          too many drafts wait; nothing of the new ones was kept
    ├── StoreError              the local store
    │   ├── StoreBusy               another client has it open
    │   ├── StoreMismatch           it belongs to another client id
    │   └── StoreUnusable           it is no store, damaged, newer, or cannot be written
    └── LinkError               the connection
        ├── ConnectFailed           it could not be opened
        └── LinkClosed              it is gone; the close code says what the server meant by it
    RemoteError                 a node that events are published to, or read from
    ├── RemoteRefused           the node said no; ``error_code`` is the node's own code for it
    ├── RemoteUnavailable       the node was not reached in time; whether an event was stored is unknown
    ├── RemoteStopped           connecting again is of no use: the token is not accepted, or the protocols do not fit
    ├── LedgerRefused           the ledger said no; ``error_class`` and ``subclass`` say why
    ├── AnswerLost              whether the ledger did what it was asked is not known
    └── RemoteClosed            this end was closed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from tidings.core.errors import TidingsError
from tidings.wire.events import ErrorInfo
from tidings.wire.sync_frames import ItemError


class ClientError(TidingsError):
    """The root of what the sync client raises."""

    code = "client.error"


class ClientClosed(ClientError):
    """The client is not open."""

    code = "client.closed"
    text = "the client is not open"


class ClientStopped(ClientError):
    """
    The client does not connect any more, since trying again would change nothing.

    Drafts are kept and sent by the next client on the same store.
    """

    code = "client.stopped"
    text = "the client stopped ({reason}): {message}"
    reason: str
    message: str
    hint: str | None = None


class InvalidDraft(ClientError):
    """An event breaks a rule that this client can check itself; it was neither kept nor sent."""

    code = "client.invalid_draft"

    def __init__(self, errors: Sequence[ItemError]) -> None:
        super().__init__(*errors)
        self.errors = tuple(errors)

    def describe(self) -> str:
        return "; ".join(f"{error.field}: {error.message}" for error in self.errors)


class DraftQueueFull(ClientError):
    """The local queue has no room for more drafts; none of the new ones was kept."""

    code = "client.queue_full"
    retryable = True
    hint = "wait until the server has taken some, or discard what is in quarantine"
    text = "the local queue is full ({bound}): {waiting} drafts wait, {quarantined} are in quarantine"
    waiting: int
    quarantined: int
    bound: str


class StoreError(ClientError):
    """Something is the matter with the local store; ``path`` names it."""

    code = "client.store_error"
    text = "{path}: {problem}"
    path: str
    problem: str


class StoreBusy(StoreError):
    """Another client, perhaps in another process, has the store open."""

    code = "client.store_busy"
    retryable = True
    hint = "give each running client a store, and a client id, of its own"


class StoreMismatch(StoreError):
    """The store belongs to another client id, so its drafts are not this client's to send."""

    code = "client.store_mismatch"


class StoreUnusable(StoreError):
    """The store is no store, is damaged, was written by a newer version, or cannot be written."""

    code = "client.store_unusable"
    hint = "the file was left as it is; committed events come back into a new store by themselves, drafts do not"


class LinkError(ClientError):
    """The connection could not be opened, or is gone. The client tries again by itself."""

    code = "client.link_error"
    retryable = True


class ConnectFailed(LinkError):
    """No connection could be opened."""

    code = "client.connect_failed"
    retryable = True
    text = "cannot connect to {url}: {problem}"
    url: str
    problem: str
    status: int | None = None
    """Of the HTTP answer, if there was one."""
    retry_after_s: int | None = None
    """When to come again, if the answer said so."""


class LinkClosed(LinkError):
    """The connection is gone; ``close_code`` is the WebSocket close code, 1006 if there was none."""

    code = "client.link_closed"
    retryable = True
    close_code: int
    reason: str = ""

    def describe(self) -> str:
        return f"the connection was closed with code {self.close_code}{f' ({self.reason})' if self.reason else ''}"


class RemoteError(TidingsError):
    """The root of what talking to a node raises."""

    code = "remote.error"


class RemoteRefused(RemoteError):
    """The node refused; ``error_code`` says why and is safe to match on, ``may_retry`` whether trying again can help."""

    code = "remote.refused"
    text = "the node refused: {detail} ({error_code})"
    error_code: str
    detail: str

    def __init__(self, error: ErrorInfo, status: int | None = None, retry_after_s: int | None = None) -> None:
        super().__init__(error.code, error.detail)
        self.status = status
        """Of the HTTP answer, if it was one."""
        self.retry_after_s = retry_after_s
        """When to come again, if the answer said so."""
        self.may_retry = error.retryable
        self.hint = error.hint


class RemoteUnavailable(RemoteError):
    """The node was not reached, or did not answer. An event may have been stored; sending it again with its id settles it."""

    code = "remote.unavailable"
    retryable = True
    text = "no answer from {url}: {problem}"
    url: str
    problem: str


class RemoteStopped(RemoteError):
    """Connecting again as things are would end the same way."""

    code = "remote.stopped"
    hint = "correct the reason, then start anew"
    text = "the connection to {url} was given up: {problem}"
    url: str
    problem: str


class LedgerRefused(RemoteError):
    """The ledger said no. ``error_class`` and ``subclass`` are what programs look at; ``details`` has more where there is more."""

    code = "remote.ledger_refused"
    text = "the ledger refused ({kind}): {problem}"
    error_class: str
    subclass: str
    problem: str
    details: dict[str, Any]

    @property
    def kind(self) -> str:
        """Class and subclass, with a slash between them."""
        return f"{self.error_class}/{self.subclass}" if self.subclass else self.error_class

    def describe(self) -> str:
        return f"the ledger refused ({self.kind}): {self.problem}"


class AnswerLost(RemoteError):
    """
    The connection broke before the answer to something that changes the ledger came: it was done, or not.

    If ``may_repeat``, asking again is safe: done twice it comes to the same as done once, and the second time may be refused because of the first.
    Otherwise look before asking again: it might be done twice.
    """

    code = "remote.answer_lost"
    text = "whether {op} was done is not known: {problem}"
    op: str
    may_repeat: bool
    problem: str

    def __init__(self, op: str, may_repeat: bool, problem: str) -> None:
        super().__init__(op, may_repeat, problem)
        self.hint = (
            "ask again" if may_repeat else "look whether it was done before asking again; it might be done twice"
        )


class RemoteClosed(RemoteError):
    """This end was closed."""

    code = "remote.closed"
    text = "the connection to the node was closed at this end"
