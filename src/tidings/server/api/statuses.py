"""Which HTTP status stands for which error. Below the server errors know nothing of HTTP; this is the one table."""

from __future__ import annotations

from typing import Final

from tidings.core.errors import TidingsError

__all__ = ["RETRY_AFTER_S", "status_of"]

RETRY_AFTER_S: Final = 1
"""What ``Retry-After`` says with 503: what passes by itself mostly does so soon."""

_STATUSES: Final = {
    "event.invalid": 400,
    "event.invalid_name": 400,
    "event.invalid_payload": 400,
    "event.invalid_timestamp": 400,
    "event.repeated_key": 400,
    "settings.invalid": 400,
    "bus.topic_mismatch": 400,
    "bus.invalid_batch": 400,
    "access.invalid_change": 400,
    "access.invalid_policy": 400,
    "access.auth_failed": 401,
    "access.token_invalid": 401,
    "access.token_expired": 401,
    "access.token_revoked": 401,
    "access.forbidden": 403,
    "log.sealed_payload": 403,
    "log.unknown_topic": 404,
    "bus.unknown_group": 404,
    "bus.unknown_dead_letter": 404,
    "log.id_conflict": 409,
    "log.epoch_mismatch": 409,
    "bus.subscription_exists": 409,
    "bus.cursor_damaged": 409,
    "log.no_sealing_key": 409,
    "log.position_trimmed": 410,
    "log.read_only": 503,
    "log.closed": 503,
    "bus.closed": 503,
}


def status_of(error: TidingsError) -> int:
    """
    The status to answer with.

    An error of the server's own says it itself. One that is not in the table is 503 if trying again can help, and 500 if not.
    """
    own = getattr(error, "status", None)
    if isinstance(own, int):
        return own
    return _STATUSES.get(error.code, 503 if error.retryable else 500)
