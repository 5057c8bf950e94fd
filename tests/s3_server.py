"""An S3 server of the tests' own, on loopback: ``moto``, which has what delta-rs needs to commit (a put only if nothing is there)."""

from __future__ import annotations

import contextlib
import itertools
import re
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tidings.pipeline.storage import Storage

SECRET = "a-secret-that-nobody-may-see"
_buckets = itertools.count()
_said: dict[str, Path] = {}
"""By server, the file that has a line for each request."""
_REQUEST = re.compile(r"([A-Z]+) (/\S*) HTTP/")


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Where an S3 server listens."""
    with s3_server() as url:
        yield url


@contextlib.contextmanager
def s3_server() -> Iterator[str]:
    """Start one; where it listens."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    url = f"http://127.0.0.1:{port}"
    folder = tempfile.TemporaryDirectory()
    _said[url] = Path(folder.name, "requests")
    with _said[url].open("wb") as said:
        process = subprocess.Popen(
            [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
            stdout=subprocess.DEVNULL,
            stderr=said,
        )
    try:
        for _ in range(600):
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{url}/moto-api/", timeout=5).close()
                break
            assert process.poll() is None, "the S3 server ended; is moto installed?"
            threading.Event().wait(0.05)
        yield url
    finally:
        process.kill()
        process.wait()
        folder.cleanup()


@contextlib.contextmanager
def recorded(url: str) -> Iterator[list[tuple[str, str]]]:
    """What the server is asked meanwhile, in a list that is filled at the end: methods and paths."""
    found: list[tuple[str, str]] = []
    begin = _said[url].stat().st_size
    yield found
    lines = _said[url].read_bytes()[begin:].decode()
    found += [(method, urlsplit(path).path) for method, path in _REQUEST.findall(lines)]


def options_of(url: str) -> dict[str, str]:
    """What delta-rs needs to know of the server."""
    return {
        "AWS_ENDPOINT_URL": url,
        "AWS_ALLOW_HTTP": "true",
        "AWS_REGION": "us-east-1",
        "AWS_ACCESS_KEY_ID": "tests",
        "AWS_SECRET_ACCESS_KEY": SECRET,
    }


def new_bucket(url: str) -> Storage:
    """A bucket that nobody else uses."""
    name = f"bucket-{next(_buckets)}"
    urllib.request.urlopen(urllib.request.Request(f"{url}/{name}", method="PUT"), timeout=10).close()
    return Storage.of(f"s3a://{name}/lake", options_of(url))
