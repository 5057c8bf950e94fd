"""
The lake's tables as Polars frames. First, in this folder: python quickstart.py; tidings pipeline run --once
"""

import polars as pl

orders = (
    pl.scan_delta("workspace/lake/tables/silver/events")
    .filter(pl.col("type") == "ORDER_PLACED")
    .with_columns(cents=pl.col("payload").str.json_path_match("$.cents").cast(pl.Int64))
    .group_by("topic")
    .agg(pl.len().alias("count"), pl.col("cents").sum())
)
for row in orders.collect().iter_rows():
    print(*row)
