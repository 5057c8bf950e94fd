"""
Benchmarks of the log: what it costs, next to what the same disk and interpreter give without it.

``python -m benchmarks`` runs all of them; docs/topics/performance.md says how to read the result.
"""
