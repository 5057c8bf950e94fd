"""The ledger: authoritative stores that are folded from the log, and whose every change is told as a happening."""
