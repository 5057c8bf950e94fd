"""The command line tool ``tidings``: one module a noun, ``main`` as the entry point."""

from .root import main

__all__ = ["main"]
