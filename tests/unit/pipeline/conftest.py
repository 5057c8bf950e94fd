"""The Spark session and the S3 server that the pipeline's tests share."""

from __future__ import annotations

from tests.s3_server import s3_url
from tests.spark_session import spark

__all__ = ["s3_url", "spark"]
