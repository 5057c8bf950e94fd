"""The Spark session and the S3 server that the pipeline's tests share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.s3_server import s3_server
from tests.spark_session import spark

__all__ = ["s3_url", "spark"]


@pytest.fixture(scope="session")
def s3_url() -> Iterator[str]:
    """Where an S3 server listens."""
    with s3_server() as url:
        yield url
