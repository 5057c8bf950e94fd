"""The process that one measurement runs in: a request on standard input, the result on standard output."""

from __future__ import annotations

import sys

from .running import answer

if __name__ == "__main__":
    sys.stdout.buffer.write(answer(sys.stdin.buffer.read()))
