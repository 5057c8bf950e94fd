"""The Python client of a node."""
