"""The Spark session that the pipeline's properties share with other tests."""

from __future__ import annotations

from tests.spark_session import spark

__all__ = ["spark"]
