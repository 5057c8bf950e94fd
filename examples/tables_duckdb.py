"""
Ask the lake's tables in SQL with DuckDB. First, in this folder: python quickstart.py; tidings pipeline run --once
"""

import duckdb
from deltalake import DeltaTable

events = DeltaTable("workspace/lake/tables/silver/events").to_pyarrow_dataset()

for topic, count, cents in duckdb.sql(
    """
    SELECT topic, count(*), sum((payload ->> 'cents')::BIGINT)
    FROM events
    WHERE type = 'ORDER_PLACED'
    GROUP BY topic
    """
).fetchall():
    print(topic, count, cents)
