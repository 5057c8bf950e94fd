"""
The form of a descriptor: what it must have, of which kind, and how much; the same for events that are told and for those that are read again.

A summary holds ids, counts and fixed words under the names that its type declares, and nothing else: no nested value, no contents, nothing that
looks like a key or a token.
"""

from __future__ import annotations

import re
from types import MappingProxyType
from typing import Final

from tidings.access.visibility import ReadScope
from tidings.core.names import OBJECT_ID

from .constants import SUMMARY_BYTES_MAX, SUMMARY_CHARS_MAX, SUMMARY_ITEMS_MAX, SUMMARY_KEYS_MAX
from .contexts import ReducedVisibility, RequestContext
from .descriptors import SEQ_MAX, EventDescriptor, ResumeHint
from .envelopes import encode
from .errors import InvalidDescriptor, ProtocolCode
from .event_types import FORBIDDEN_FIELDS, SCOPE_KEYS, EventDeclaration
from .names import channel_of, check_event_name, class_of

_TRACE_ID: Final = re.compile(r"[\x21-\x7e]{1,128}")
_SURROGATE: Final = re.compile(r"[\ud800-\udfff]")
_SECRET: Final = re.compile(rb"-----BEGIN |eyJ[A-Za-z0-9_-]{5,}\.eyJ[A-Za-z0-9_-]{5,}\.")
"""A key as it is written to files, and a signed token."""


def check_form(descriptor: EventDescriptor, declaration: EventDeclaration | None) -> None:
    """
    Make sure of everything that can be said of a descriptor without asking who tells it.

    Args:
        declaration: That of its type, if there is one.

    Raises:
        InvalidDescriptor: Something is missing, of the wrong kind or not well-formed; or its summary is not as its type declares.
    """
    _check_text("source_manager", descriptor.source_manager)
    _check_text("event_class", descriptor.event_class)
    _check_text("event_type", descriptor.event_type)
    _check_text("app_id", descriptor.app_id)
    if descriptor.domain_id is not None:
        _check_text("domain_id", descriptor.domain_id)
    _check_context(descriptor.operation_context)
    check_count("sequence_anchor_hint", descriptor.sequence_anchor_hint)
    if class_of(descriptor.event_class) is None:
        raise InvalidDescriptor(
            "event_class", f"there is no class {descriptor.event_class!r}", ProtocolCode.INVALID_TYPE
        )
    if declaration is None:
        check_event_name(descriptor.event_type)
    if channel_of(descriptor.event_type) != descriptor.event_class:
        raise InvalidDescriptor(
            "event_type",
            f"{descriptor.event_type} is not of class {descriptor.event_class}",
            ProtocolCode.INVALID_TYPE,
        )
    if descriptor.read_scope is not None and not isinstance(descriptor.read_scope, ReadScope):
        raise InvalidDescriptor("read_scope", "is no ReadScope", ProtocolCode.INVALID_TYPE)
    _check_hint(descriptor.scope_hint)
    hint = descriptor.resume_hint
    if hint is not None:
        if not isinstance(hint, ResumeHint):
            raise InvalidDescriptor("resume_hint", "is no ResumeHint", ProtocolCode.INVALID_TYPE)
        check_count("resume_hint.global_seq", hint.global_seq)
        check_count("resume_hint.local_order", hint.local_order)
    _check_summary(descriptor.payload_summary, declaration)


def _check_text(field: str, value: object) -> None:
    if type(value) is not str:
        if value is None:
            raise InvalidDescriptor(field, "is missing", ProtocolCode.MISSING_FIELD)
        raise InvalidDescriptor(field, "must be text", ProtocolCode.INVALID_TYPE)
    if not value:
        raise InvalidDescriptor(field, "is missing", ProtocolCode.MISSING_FIELD)
    if len(value) > SUMMARY_CHARS_MAX:
        raise InvalidDescriptor(field, f"is longer than {SUMMARY_CHARS_MAX} characters", ProtocolCode.INVALID_ENCODING)
    if not value.isascii() and _SURROGATE.search(value) is not None:
        raise InvalidDescriptor(field, "is no text that can be written down", ProtocolCode.INVALID_ENCODING)


def check_count(field: str, value: object) -> None:
    if type(value) is not int:
        if value is None:
            raise InvalidDescriptor(field, "is missing", ProtocolCode.MISSING_FIELD)
        raise InvalidDescriptor(field, "must be an integer", ProtocolCode.INVALID_TYPE)
    if not 0 <= value <= SEQ_MAX:
        raise InvalidDescriptor(field, f"{value} is not between 0 and {SEQ_MAX}", ProtocolCode.INVALID_ENCODING)


def _check_context(context: object) -> None:
    if context is None:
        raise InvalidDescriptor("operation_context", "is missing", ProtocolCode.MISSING_FIELD)
    if isinstance(context, RequestContext):
        if context.requester_identity_id is not None:
            _check_text("operation_context.requester_identity_id", context.requester_identity_id)
        if context.device_id is not None:
            _check_text("operation_context.device_id", context.device_id)
    elif isinstance(context, ReducedVisibility):
        _check_text("operation_context.source_manager", context.source_manager)
    else:
        raise InvalidDescriptor(
            "operation_context", "is neither a request's nor a reduced one", ProtocolCode.INVALID_TYPE
        )
    _check_text("operation_context.app_id", context.app_id)
    if not isinstance(context.trace_id, str) or _TRACE_ID.fullmatch(context.trace_id) is None:
        raise InvalidDescriptor(
            "operation_context.trace_id", "must be 1 to 128 printable characters", ProtocolCode.INVALID_ENCODING
        )


def _check_hint(hint: object) -> None:
    if type(hint) is not MappingProxyType:
        raise InvalidDescriptor("scope_hint", "must be a mapping", ProtocolCode.INVALID_TYPE)
    for key, value in hint.items():
        if key not in SCOPE_KEYS:
            raise InvalidDescriptor(
                "scope_hint", f"has a key other than {', '.join(sorted(SCOPE_KEYS))}", ProtocolCode.INVALID_ENCODING
            )
        _check_text(f"scope_hint.{key}", value)


def _check_summary(summary: object, declaration: EventDeclaration | None) -> None:
    if type(summary) is not MappingProxyType:
        raise InvalidDescriptor("payload_summary", "must be a mapping", ProtocolCode.INVALID_TYPE)
    if len(summary) > SUMMARY_KEYS_MAX:
        raise InvalidDescriptor(
            "payload_summary", f"has more than {SUMMARY_KEYS_MAX} keys", ProtocolCode.INVALID_ENCODING
        )
    for key, value in summary.items():
        if type(key) is not str or key in FORBIDDEN_FIELDS:
            raise InvalidDescriptor(
                "payload_summary", f"{key!r} is no field of a summary", ProtocolCode.INVALID_ENCODING
            )
        if declaration is not None and key not in declaration.fields and key not in declaration.optional_fields:
            raise InvalidDescriptor(
                "payload_summary", f"{declaration.event_type} has no field {key!r}", ProtocolCode.INVALID_ENCODING
            )
        kind = type(value)
        if kind is str:
            _check_chars(key, value)
        elif kind is tuple:
            if len(value) > SUMMARY_ITEMS_MAX:
                raise InvalidDescriptor(
                    f"payload_summary.{key}", f"has more than {SUMMARY_ITEMS_MAX} texts", ProtocolCode.INVALID_ENCODING
                )
            for each in value:
                _check_chars(key, each)
        elif kind is int:
            if not -SEQ_MAX <= value <= SEQ_MAX:
                raise InvalidDescriptor(
                    f"payload_summary.{key}", "is too large an integer", ProtocolCode.INVALID_ENCODING
                )
        elif value is not None and kind is not bool:
            raise InvalidDescriptor(
                f"payload_summary.{key}",
                "must be null, true or false, an integer, a text or a tuple of texts",
                ProtocolCode.INVALID_TYPE,
            )
    if declaration is not None:
        for field in declaration.fields:
            if field not in summary:
                raise InvalidDescriptor("payload_summary", f"lacks {field}", ProtocolCode.MISSING_FIELD)
        if declaration.is_object_scoped:
            _check_objects(summary["object_ids"])
    try:
        encoded = encode(summary)
    except (UnicodeEncodeError, ValueError) as error:
        raise InvalidDescriptor(
            "payload_summary", f"cannot be encoded: {error}", ProtocolCode.INVALID_ENCODING
        ) from error
    if len(encoded) > SUMMARY_BYTES_MAX:
        raise InvalidDescriptor(
            "payload_summary", f"has {len(encoded)} bytes, more than {SUMMARY_BYTES_MAX}", ProtocolCode.INVALID_ENCODING
        )
    if _SECRET.search(encoded) is not None:
        raise InvalidDescriptor("payload_summary", "holds a key or a token", ProtocolCode.INVALID_ENCODING)


def _check_chars(key: str, text: object) -> None:
    if type(text) is not str:
        raise InvalidDescriptor(f"payload_summary.{key}", "must be a tuple of texts", ProtocolCode.INVALID_TYPE)
    if len(text) > SUMMARY_CHARS_MAX:
        raise InvalidDescriptor(
            f"payload_summary.{key}", f"is longer than {SUMMARY_CHARS_MAX} characters", ProtocolCode.INVALID_ENCODING
        )


def _check_objects(objects: object) -> None:
    if not isinstance(objects, tuple) or not objects:
        raise InvalidDescriptor(
            "payload_summary.object_ids", "must be a tuple of at least one object", ProtocolCode.INVALID_TYPE
        )
    for each in objects:
        if OBJECT_ID.fullmatch(each) is None:
            raise InvalidDescriptor(
                "payload_summary.object_ids", f"{each!r} is not <type>:<id>", ProtocolCode.INVALID_ENCODING
            )
