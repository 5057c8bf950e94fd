"""
What the happenings answer when they cannot do what they were asked.

    HappeningsError
    ├── VariantDeclaredTwice    two variants have the same name
    ├── InvalidHappening        no type, or a field of a known variant does not fit
    ├── InvalidHappeningFilter  a filter that cannot be used
    ├── InvalidCoalescing       labels or window that cannot be used
    ├── InvalidCursor           no seq that there could be
    ├── CursorTooOld            what was asked for is no longer kept; says what is
    ├── Lagged                  the reader was too slow and missed some; says how many, and reading goes on
    └── HappeningsClosed        nothing more will come
"""

from __future__ import annotations

from tidings.core.errors import TidingsError


class HappeningsError(TidingsError):
    """The root of what the happenings raise."""

    code = "happenings.error"


class VariantDeclaredTwice(HappeningsError):
    """Two variants have the same name."""

    code = "happenings.declared_twice"
    text = "the variant {variant!r} is declared already, by {by}"
    hint = "give the class another name"
    variant: str
    by: str


class InvalidHappening(HappeningsError):
    """Something is no happening: it has no type, or a field of a known variant does not fit."""

    code = "happenings.invalid"
    text = "{variant!r} is no valid happening: {problem}"
    variant: str
    problem: str


class InvalidHappeningFilter(HappeningsError):
    """A filter cannot be used; ``field`` names the part at fault, and is empty if it is the whole."""

    code = "happenings.invalid_filter"
    hint = "give lists of names under variants, plugins, shelves or subjects"
    field: str
    problem: str

    def describe(self) -> str:
        return f"{'.'.join(filter(None, ['filter', self.field]))}: {self.problem}"


class InvalidCoalescing(HappeningsError):
    """Happenings cannot be coalesced as asked; ``field`` names the part at fault."""

    code = "happenings.invalid_coalescing"
    text = "coalesce.{field}: {problem}"
    field: str
    problem: str


class InvalidCursor(HappeningsError):
    """Something is no seq: seqs are whole numbers that take 64 bits at most."""

    code = "happenings.invalid_cursor"
    text = "since: {value} is no seq; seqs are whole numbers from 0 to 2**64 - 1"
    value: str


def check_seq(value: int) -> None:
    """
    See that something can be a seq.

    Raises:
        InvalidCursor: It cannot.
    """
    if type(value) is not int or not 0 <= value < 1 << 64:
        raise InvalidCursor(f"{value!r:.40}")


class CursorTooOld(HappeningsError):
    """Happenings after the cursor were dropped, so that reading on from it would leave them out."""

    code = "happenings.cursor_too_old"
    text = "happenings after seq {since} are no longer kept; the oldest kept is {oldest_available_seq}, the newest {current_seq}"
    hint = "read the ledger's state, which is pinned to a seq, and subscribe since that"
    since: int
    oldest_available_seq: int
    """0 if none is kept."""
    current_seq: int


class Lagged(HappeningsError):
    """
    A reader was slower than its buffer is long, and missed this many that it would have got. It is still subscribed: the next read
    gives the oldest that is left.
    """

    code = "happenings.lagged"
    retryable = True
    text = "{missed_count} happenings were missed; the oldest that can be had is {oldest_available_seq}, the newest {current_seq}"
    hint = "read the state again from the ledger, or subscribe again since the last seq seen"
    missed_count: int
    oldest_available_seq: int
    """Of a receiver the oldest in its buffer, of a subscription the oldest that history has; 0 if there is none."""
    current_seq: int


class HappeningsClosed(HappeningsError):
    """The bus or the receiver was closed, and everything before that was read."""

    code = "happenings.closed"
    text = "no more happenings will come"
