"""Offline-first clients: submit a batch, get a verdict for each item, catch up in pages, hear broadcasts."""
