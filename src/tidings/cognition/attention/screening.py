"""
The gate's first stage: is the request whole, and does its band let it be looked at at all?

Fails closed: what is missing or not known is refused, with the reason.
"""

from __future__ import annotations

from typing import Final

import msgspec

from tidings.core.actors import SecurityBand

from ..words import has_secret, personal_data_kinds
from .profiles import BAND_RULES
from .requests import GateRequest

__all__ = ["Screening", "screen"]

_AUDITED_SPACES: Final = ("shared:", "extended:", "interfamily:")


class Screening(msgspec.Struct, frozen=True, kw_only=True):
    """What the first stage found."""

    band: SecurityBand
    refusals: tuple[str, ...]
    notes: tuple[str, ...]
    obligations: tuple[str, ...]
    processing_ms_max: int


def screen(request: GateRequest, text_chars_max: int) -> Screening:
    """Check a request's form and policy, and collect what has to be done with it whatever is decided."""
    refusals = [
        f"missing:{name}"
        for name, value in (
            ("request_id", request.request_id),
            ("actor.person_id", request.actor.person_id),
            ("space_id", request.space_id),
            ("policy.band", request.band),
        )
        if not value
    ]
    is_known = request.band in set(SecurityBand)
    band = SecurityBand(request.band) if is_known else SecurityBand.BLACK
    if request.band and not is_known:
        refusals.append("band_unknown")
    elif is_known and band is SecurityBand.BLACK:
        refusals.append("band_black")
    if len(request.text) > text_chars_max:
        # Said before anything searches it: the limit is also what bounds the work on hostile text.
        refusals.append("text_too_long")
        return Screening(
            band=band, refusals=tuple(refusals), notes=(), obligations=request.obligations, processing_ms_max=0
        )

    notes: list[str] = []
    obligations = set(request.obligations)
    if band.rank >= SecurityBand.RED.rank:
        obligations.add("AUDIT_ACCESS")
        if has_secret(request.text):
            refusals.append("secret_in_restricted_band")
    if band is SecurityBand.AMBER:
        obligations.add("LOG_ACCESS")
    kinds = personal_data_kinds(request.text)
    if kinds:
        obligations.add("REDACT_PII")
        notes.extend(f"personal_data:{kind}" for kind in kinds)
    audited = [f"role:{request.actor.role}"] if request.actor.role in ("guest", "child") else []
    if request.space_id.startswith(_AUDITED_SPACES):
        audited.append(f"space:{request.space_id.partition(':')[0]}")
    if audited:
        obligations.add("AUDIT_ACCESS")
        notes.extend(audited)
    return Screening(
        band=band,
        refusals=tuple(refusals),
        notes=tuple(notes),
        obligations=tuple(sorted(obligations)),
        processing_ms_max=BAND_RULES[band].processing_ms_max,
    )
