"""The node: the only place where things are put together."""
