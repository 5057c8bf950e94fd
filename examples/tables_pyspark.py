"""
The log as a table in Spark, without the pipeline. First, in this folder: python quickstart.py
"""

from pathlib import Path

from pyspark.sql import functions as F

from tidings.spark import session

spark = session()
events = spark.read.format("tidings").load(str(Path("workspace").resolve()))

orders = (
    events.where("type = 'ORDER_PLACED'")
    .groupBy("topic")
    .agg(F.count("*"), F.sum(F.get_json_object("payload", "$.cents").cast("bigint")))
)
for row in orders.collect():
    print(*row)
