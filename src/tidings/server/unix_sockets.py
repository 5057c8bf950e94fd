"""Unix sockets to listen on: made for whom they are meant, and never in the place of somebody else's."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

from .errors import AddressInUse, AddressUnusable


def listening_socket(path: Path, mode: int) -> socket.socket:
    """
    A socket that is bound to a path and does not listen yet, with these permissions. A socket that a killed node left behind is replaced.

    Raises:
        AddressInUse: Somebody listens there.
        AddressUnusable: The path cannot be used.
    """
    _clear_stale(path)
    bound = socket.socket(socket.AF_UNIX)
    try:
        bound.bind(str(path))
        # Before anybody can connect: nobody listens yet.
        path.chmod(mode)
        bound.setblocking(False)
    except OSError as error:
        bound.close()
        raise AddressUnusable(f"unix:{path}", error.strerror or str(error)) from error
    return bound


def _clear_stale(path: Path) -> None:
    """Take away a socket that a killed node left behind; never one that somebody listens on, never another kind of file."""
    try:
        mode = path.stat().st_mode
    except FileNotFoundError:
        return
    except OSError as error:
        raise AddressUnusable(f"unix:{path}", error.strerror or str(error)) from error
    if not stat.S_ISSOCK(mode):
        raise AddressUnusable(f"unix:{path}", "there is a file of another kind")
    with socket.socket(socket.AF_UNIX) as probe:
        probe.settimeout(1.0)
        try:
            probe.connect(str(path))
        except (ConnectionRefusedError, FileNotFoundError):
            path.unlink(missing_ok=True)
            return
        except OSError:
            pass
    raise AddressInUse(f"unix:{path}")
