"""
A message of a sync client in which an object has a key twice.

Inside an item it is the item's fault, as other items can be good. Around the items nobody can say which of the two was meant, and the
message is refused as a whole.
"""

from __future__ import annotations

from tidings.core.strict_json import RepeatedKey, RepeatingObject, parse_marking_repeats, parse_strict
from tidings.wire.sync_errors import MalformedFrame

from .requests import ItemError, Request, SubmitRequest

__all__ = ["judge_repeated_keys"]


def judge_repeated_keys(message: bytes, request: Request) -> None:
    """
    Mark items of a request whose own keys are repeated in the message. What is within an event the dialects find themselves.

    Raises:
        MalformedFrame: A key is repeated outside of the items.
    """
    try:
        parse_strict(message)
    except RepeatedKey as error:
        if not isinstance(request, SubmitRequest):
            raise MalformedFrame(error.problem) from error
        envelope = parse_marking_repeats(message)
        payload = envelope["payload"]
        if isinstance(envelope, RepeatingObject) or isinstance(payload, RepeatingObject):
            raise MalformedFrame(error.problem, "submit_events") from error
        for item, given in zip(request.items, payload["events"], strict=False):
            if isinstance(given, RepeatingObject) and not item.errors:
                item.errors = (ItemError(field="", message=error.problem),)
    except ValueError:
        return  # too deep for this parser; what it means for an item its dialect has said
