"""
Tidings: a durable event platform that runs inside a Python process.

Importing this package loads nothing but its version; each door (``tidings.bus``, ``tidings.log``, ...)
is imported by its own name, so a Spark executor or a small client pays only for what it uses.
"""

from typing import Final

__all__ = ["__version__"]

__version__: Final = "0.1.0"
