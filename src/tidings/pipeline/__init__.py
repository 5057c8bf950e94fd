"""The data pipeline: everything that works on the log in bulk, on Spark through PySpark."""
