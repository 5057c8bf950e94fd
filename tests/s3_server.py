"""An S3 server of the tests' own, on loopback: ``moto``, which has what delta-rs needs to commit (a put only if nothing is there)."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import urllib.request
from collections.abc import Iterator
from urllib.parse import urlsplit

import pytest

from tidings.pipeline.storage import Storage

SECRET = "a-secret-that-nobody-may-see"
_buckets = itertools.count()


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
    folder = tempfile.TemporaryDirectory()
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "MOTO_RECORDER_FILEPATH": f"{folder.name}/requests"},
    )
    url = f"http://127.0.0.1:{port}"
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

    def ask(what: str) -> bytes:
        request = urllib.request.Request(f"{url}/moto-api/recorder/{what}-recording", method="POST")
        with urllib.request.urlopen(request, timeout=10) as answer:
            return bytes(answer.read())

    found: list[tuple[str, str]] = []
    ask("reset")
    ask("start")
    try:
        yield found
    finally:
        ask("stop")
    with urllib.request.urlopen(f"{url}/moto-api/recorder/download-recording", timeout=10) as answer:
        asked = [json.loads(line) for line in answer]
    found += [(each["method"], urlsplit(each["url"]).path) for each in asked]


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
