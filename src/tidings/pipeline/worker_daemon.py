"""
The process that Spark's Python workers are forked from: Spark's own, but for the collection of garbage.

Spark's worker collects after every task. With pandas, pyarrow and DuckDB loaded that goes over some hundred thousand objects that
stay, and takes longer than most tasks over a few events. So what was loaded is set aside first, when there is more of it than
before, and the collections look at what tasks left behind.
"""

from __future__ import annotations

import gc
import socket
import sys

from pyspark import daemon

_work_off = daemon.worker
_loaded = 0


def worker(sock: socket.socket, authenticated: bool) -> int:
    """Work off one task, and set aside what it loaded."""
    global _loaded
    code = _work_off(sock, authenticated)
    if len(sys.modules) > _loaded:
        _loaded = len(sys.modules)
        gc.collect()
        gc.freeze()
    return code


if __name__ == "__main__":
    daemon.worker = worker
    daemon.manager()
