"""What appointments and watches are refused for."""

from __future__ import annotations

from tidings.ledger.errors import ErrorClass, LedgerError


class BadRecurrence(LedgerError):
    """When an appointment shall fire is not said in a way that can be kept; ``field`` names the part at fault."""

    code = "schedule.bad_recurrence"
    subclass = "bad_recurrence"
    text = "{field}: {problem}"
    field: str
    problem: str


class QuotaExceeded(LedgerError):
    """There are as many as there may be, in all or of one creator."""

    code = "schedule.quota_exceeded"
    error_class = ErrorClass.RESOURCE_EXHAUSTED
    subclass = "quota_exceeded"
    retryable = True
    text = "{whose} has {count} {what}, and no more are allowed"
    hint = "cancel some, or raise the limit in the settings"
    whose: str
    what: str
    count: int


class BadSpec(LedgerError):
    """What is to be watched cannot be understood; ``problem`` says where and why."""

    code = "schedule.bad_spec"
    subclass = "bad_spec"
    text = "{problem}"
    problem: str
