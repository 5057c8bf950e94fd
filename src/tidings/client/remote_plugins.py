"""Being a plugin of a node's ledger from another process: its verbs, and answering what it is called for."""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, Protocol

import msgspec

from tidings.core.errors import TidingsError
from tidings.ledger.errors import ErrorClass
from tidings.ledger.handlers import Assignment, Correction, Handler, PluginRequest
from tidings.wire.steward import answers, requests

from .conversation import Conversation
from .errors import LinkClosed

logger = logging.getLogger(__name__)


class _Asking(Protocol):
    async def call(self, request: requests.StewardRequest) -> dict[str, Any]:
        """The answer to a request."""
        ...


class RemotePlugin:
    """The verbs of a plugin; see ``tidings.ledger.plugins.Plugin`` for what each does."""

    def __init__(self, client: _Asking, name: str) -> None:
        self._client = client
        self.name = name

    async def announce_subject(
        self, subject_type: str, addressings: Sequence[tuple[str, str]], *, state: Any = None
    ) -> str | None:
        """Say that there is a subject; its canonical id, none after a conflict."""
        answer = await self._client.call(
            requests.AnnounceSubjectRequest(
                plugin=self.name,
                subject_type=subject_type,
                addressings=[requests.AddressingArgument(*each) for each in addressings],
                state=state,
            )
        )
        found: str | None = answer["canonical_id"]
        return found

    async def retract_addressing(self, addressing: tuple[str, str], *, reason: str | None = None) -> None:
        """Take back a name."""
        await self._client.call(
            requests.RetractAddressingRequest(
                plugin=self.name, addressing=requests.AddressingArgument(*addressing), reason=reason
            )
        )

    async def update_state(self, subject: tuple[str, str] | str, state: Any) -> None:
        """Replace a subject's state."""
        await self._client.call(requests.UpdateStateRequest(plugin=self.name, subject=_subject(subject), state=state))

    async def claim_relation(
        self, source: tuple[str, str] | str, predicate: str, target: tuple[str, str] | str, *, reason: str | None = None
    ) -> None:
        """Say that two subjects are related."""
        await self._client.call(
            requests.ClaimRelationRequest(
                plugin=self.name,
                source=_subject(source),
                predicate=predicate,
                target=_subject(target),
                reason=reason,
            )
        )

    async def retract_relation(
        self, source: tuple[str, str] | str, predicate: str, target: tuple[str, str] | str, *, reason: str | None = None
    ) -> None:
        """Take back a claim."""
        await self._client.call(
            requests.RetractRelationRequest(
                plugin=self.name,
                source=_subject(source),
                predicate=predicate,
                target=_subject(target),
                reason=reason,
            )
        )

    async def report_custody_state(self, handle: str, health: Any, payload: bytes = b"") -> None:
        """Report how work is doing."""
        await self._client.call(
            requests.ReportCustodyStateRequest(
                plugin=self.name, handle=handle, health=health, payload_b64=as_base64(payload)
            )
        )

    async def report_event(self, event_type: str, payload: Any = None) -> None:
        """Tell an event of the plugin's own."""
        await self._client.call(requests.ReportEventRequest(plugin=self.name, event_type=event_type, payload=payload))

    async def unload(self) -> None:
        """End the plugin's part: instances and addressings are retracted, custodies released."""
        await self._client.call(requests.UnloadPluginRequest(plugin=self.name))


async def serve_calls(talk: Conversation, handler: Handler) -> None:
    """Answer calls until the connection ends."""
    running: dict[int, asyncio.Task[None]] = {}
    try:
        while True:
            try:
                frame = msgspec.json.decode(await talk.next())
            except LinkClosed:
                return
            if "withdrawn" in frame:
                if (task := running.get(frame["withdrawn"])) is not None:
                    task.cancel()
            elif "call" in frame:
                number = frame["call"]
                task = running[number] = asyncio.create_task(_answer(talk, handler, frame))
                task.add_done_callback(lambda _, number=number: running.pop(number, None))  # type: ignore[misc]
    finally:
        for task in list(running.values()):
            task.cancel()


async def _answer(talk: Conversation, handler: Any, frame: dict[str, Any]) -> None:
    payload = base64.b64decode(frame.get("payload_b64", ""))
    named = {name: frame[name] for name in ("shelf", "handle_id") if name in frame}
    doing: Callable[[], Awaitable[Any]]
    match frame["kind"]:
        case "request":
            request = PluginRequest(
                shelf=frame["shelf"],
                request_type=frame["request_type"],
                payload=payload,
                instance_id=frame.get("instance_id"),
            )
            doing = lambda: handler.handle_request(request)  # noqa: E731
        case "take_custody":
            assignment = Assignment(custody_type=frame["custody_type"], payload=payload, **named)
            doing = lambda: handler.take_custody(assignment)  # noqa: E731
        case "correct_course":
            correction = Correction(correction_type=frame["correction_type"], payload=payload, **named)
            doing = lambda: handler.correct_course(correction)  # noqa: E731
        case _:
            doing = lambda: handler.release_custody(frame["handle_id"])  # noqa: E731
    error: requests.ErrorBody | None = None
    answer = b""
    try:
        answer = await doing() or b""
    except TidingsError as failure:
        error_class = str(getattr(failure, "error_class", ErrorClass.CONTRACT_VIOLATION))
        subclass = str(getattr(failure, "subclass", ""))
        error = answers.error_frame(error_class, failure.public_text, subclass).error
    except Exception as failure:
        logger.exception("a call of the plugin failed")
        error = answers.error_frame(ErrorClass.CONTRACT_VIOLATION, type(failure).__name__, "handler_failed").error
    talk.say(requests.AnswerRequest(call=frame["call"], payload_b64=as_base64(answer), error=error))


def as_base64(payload: bytes) -> str:
    """Bytes as JSON carries them."""
    return base64.b64encode(payload).decode()


def _subject(name: tuple[str, str] | str) -> requests.SubjectName:
    return name if isinstance(name, str) else requests.AddressingArgument(*name)
