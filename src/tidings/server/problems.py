"""Errors as HTTP shows them: problem documents (RFC 9457) with the error's own code, for what the edge itself refuses."""

from __future__ import annotations

from http import HTTPStatus
from typing import Any, Final

from tidings.core.errors import TidingsError

__all__ = ["PROBLEM_TYPE", "problem_of"]

PROBLEM_TYPE: Final = "application/problem+json"


def problem_of(error: TidingsError, status: int, request_id: str | None = None) -> dict[str, Any]:
    """The problem document of an error."""
    problem: dict[str, Any] = {
        "type": f"urn:tidings:error:{error.code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": error.public_text,
        "code": error.code,
        "retryable": error.retryable,
    }
    if error.hint is not None:
        problem["hint"] = error.hint
    if request_id is not None:
        problem["request_id"] = request_id
    return problem
