"""The application's jobs on Spark, each a pure function of tables: temporal (T), consolidation (C), learning (L)."""
