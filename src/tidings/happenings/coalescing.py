"""
Coalescing for one subscriber: of happenings that are alike, one in each window of time.

Two are alike if the labels that the subscriber named have the same values. The first opens a window; when that is over, one of those that came
is delivered, with the highest seq among them. A happening without one of the labels is not held up.

No I/O: whoever uses a ``Coalescer`` hands in envelopes and the time, and asks when to come back.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from typing import Annotated, Final, Literal

import msgspec

from tidings.core.validation import explain

from .bus import Envelope
from .errors import InvalidCoalescing

WINDOW_MS: Final = 100
_WINDOW_MS_MIN: Final = 1
_WINDOW_MS_MAX: Final = 5000
_LABELS_COUNT_MAX: Final = 64
_WINDOWS_COUNT_MAX: Final = 1024

Selection = Literal["latest", "first"]


class Coalescing(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How a subscriber wants happenings coalesced."""

    labels: Annotated[tuple[str, ...], msgspec.Meta(max_length=_LABELS_COUNT_MAX)]
    """What must be the same; at least one. Their order does not matter."""
    window_ms: int = WINDOW_MS
    """How long a window is; brought into 1 to 5000."""
    selection: Selection = "latest"
    """Which of a window is delivered: the latest or the first."""


def coalescing_from_json(
    *, coalesce: object = None, labels: object = None, window_ms: object = None
) -> Coalescing | None:
    """
    What a request asks for, as one object or as two members of its own.

    Args:
        coalesce: An object with ``labels``, ``window_ms`` and ``selection``.
        labels: The request's ``coalesce_labels``.
        window_ms: The request's ``coalesce_window_ms``.

    Returns:
        None if nothing is asked for.

    Raises:
        InvalidCoalescing: Both forms at once, a window without labels, no label at all, or a member that does not fit.
    """
    if coalesce is not None and (labels is not None or window_ms is not None):
        raise InvalidCoalescing(
            "labels", "both forms at once: give coalesce, or coalesce_labels and coalesce_window_ms"
        )
    if coalesce is None:
        if labels is None and window_ms is None:
            return None
        if labels is None:
            raise InvalidCoalescing("labels", "there is a window, but no labels")
        coalesce = {"labels": labels, "window_ms": WINDOW_MS if window_ms is None else window_ms}
    return _checked(coalesce)


def _checked(coalescing: object) -> Coalescing:
    try:
        found = msgspec.convert(coalescing, Coalescing)
    except msgspec.ValidationError as error:
        problem, field = explain(error)
        raise InvalidCoalescing(field or "labels", problem) from None
    if not found.labels:
        raise InvalidCoalescing("labels", "at least one label is needed")
    return found


class _Window:
    """One group of happenings that are alike, until its time is over."""

    __slots__ = ("chosen", "ends_at", "last_seq")

    def __init__(self, envelope: Envelope, ends_at: float) -> None:
        self.chosen = envelope
        self.last_seq = envelope.seq
        self.ends_at = ends_at


class Coalescer:
    """
    Holds back what is alike.

    Args:
        coalescing: By which labels, for how long.

    Raises:
        InvalidCoalescing: There is no label, or a member does not fit.
    """

    def __init__(self, coalescing: Coalescing) -> None:
        _checked(msgspec.to_builtins(coalescing))
        self._labels = sorted(set(coalescing.labels))
        self._seconds = min(max(coalescing.window_ms, _WINDOW_MS_MIN), _WINDOW_MS_MAX) / 1000
        self._is_latest = coalescing.selection == "latest"
        self._windows: dict[tuple[str, ...], _Window] = {}
        """In the order in which they end: all are equally long."""
        self._by_chosen: dict[tuple[str, ...], _Window] = {}
        """The same in the order of the seqs of what is to be delivered."""
        self._last_seq = 0

    @property
    def ends_at(self) -> float | None:
        """When the next window is over; None if there is none."""
        return next((window.ends_at for window in self._windows.values()), None)

    def observe(self, envelope: Envelope, now: float) -> list[Envelope]:
        """Take one in, with a seq above those before, the time being ``now`` in seconds; what is to be delivered because of it."""
        self._last_seq = envelope.seq
        labels = envelope.happening.labels()
        try:
            key = tuple([labels[name] for name in self._labels])
        except KeyError:
            return [envelope._replace(resume_seq=self._resume_seq())]
        window = self._windows.get(key)
        if window is None:
            self._windows[key] = self._by_chosen[key] = _Window(envelope, now + self._seconds)
            return self._close([next(iter(self._windows))]) if len(self._windows) > _WINDOWS_COUNT_MAX else []
        window.last_seq = envelope.seq
        if self._is_latest:
            window.chosen = envelope
            self._by_chosen[key] = self._by_chosen.pop(key)
        return []

    def flush(self, now: float) -> list[Envelope]:
        """What is to be delivered because its window is over, with seqs rising."""
        return self._close([key for key, _ in takewhile(lambda each: each[1].ends_at <= now, self._windows.items())])

    def drain(self) -> list[Envelope]:
        """Everything that is held back, with seqs rising."""
        return self._close(list(self._windows))

    def _close(self, keys: Sequence[tuple[str, ...]]) -> list[Envelope]:
        over = [self._windows.pop(key) for key in keys]
        for key in keys:
            del self._by_chosen[key]
        delivered: list[Envelope] = []
        resume_seq = self._resume_seq()
        for window in sorted(over, key=lambda window: window.last_seq, reverse=True):
            delivered.append(Envelope(window.last_seq, window.chosen.happening, resume_seq))
            resume_seq = min(resume_seq, window.chosen.seq - 1)  # of those before it this one is still to be delivered
        delivered.reverse()
        return delivered

    def _resume_seq(self) -> int:
        """The highest seq up to which everything was delivered, or made way for one like it that is still to come."""
        return next((window.chosen.seq - 1 for window in self._by_chosen.values()), self._last_seq)
