"""The nouns every layer shares: events, ids, names, errors, the clock. No I/O, no asyncio."""
