"""``python -m tidings.cli`` is ``tidings``."""

from . import main

main()
