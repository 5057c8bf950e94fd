"""``python -m tidings.cli`` is ``tidings``."""

from .root import main

main()
