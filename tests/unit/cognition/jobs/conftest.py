"""The Spark session that the tests of these jobs share."""

from __future__ import annotations

from tests.spark_session import spark

__all__ = ["spark"]
