"""
What strangers' objects say of themselves, as text that can be stored.

Handlers raise and answer what they like: an error whose text cannot be had, is not Unicode, or is a whole document must not
become the group's own failure.
"""

from __future__ import annotations

from typing import Final

__all__ = ["cut", "text_of"]

_CHARS_MAX: Final = 4096


def text_of(error: BaseException) -> str:
    """An error's text; its type's name if it has none."""
    try:
        text = str(error)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - it has no text, then
        text = ""
    return cut(text) or type(error).__name__


def cut(text: object) -> str:
    """A text of bounded length that every encoding takes."""
    try:
        text = text if isinstance(text, str) else repr(text)
    except (SystemExit, KeyboardInterrupt):
        raise
    except BaseException:  # noqa: BLE001 - not even that
        text = f"<{type(text).__name__}>"
    if len(text) > _CHARS_MAX:
        text = f"{text[:_CHARS_MAX]}... ({len(text):,} characters)"
    return text if text.isascii() else text.encode(errors="backslashreplace").decode()
