"""
The lake's tables as pandas frames. First, in this folder: python quickstart.py; tidings pipeline run --once
"""

import json

from deltalake import DeltaTable

events = DeltaTable("workspace/lake/tables/silver/events").to_pandas(
    columns=["topic", "payload"], filters=[("type", "=", "ORDER_PLACED")]
)
events["cents"] = [json.loads(payload)["cents"] for payload in events.payload]
for row in events.groupby("topic").cents.agg(["size", "sum"]).itertuples():
    print(*row)
