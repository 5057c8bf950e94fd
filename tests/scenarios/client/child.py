"""
A client to be killed: submits numbers, and tells each one on its standard output once it was taken.

    python child.py <url> <store> <client id> <token> <first number>

``open`` comes first, then a line ``taken <number>`` for each draft that is stored. It never stops by itself, and never closes.
"""

from __future__ import annotations

import asyncio
import os
import sys

from tidings.client import ClientSettings, LocalEvent, SyncClient, ViewOf

SETTINGS = ClientSettings(page_events=50, batch_events_max=5, refresh_events=20, snapshot_events=25, retry_s_min=0.02)


def add(state: list[int], event: LocalEvent) -> list[int]:
    """One more number."""
    return [*state, event.payload["data"]["n"]]


def make_client(url: str, store: str, client_id: str, token: str) -> SyncClient[list[int]]:
    """The same client, in whatever process."""
    return SyncClient(
        url,
        token=token,
        client_id=client_id,
        store=store,
        partitions=["P1"],
        view=ViewOf[list[int]](add, []),
        settings=SETTINGS,
        required_profile="canonical",
    )


def tell(text: str) -> None:
    """One write a line: a line is there whole or not at all, and not in a buffer when the process dies."""
    os.write(sys.stdout.fileno(), text.encode() + b"\n")


async def main(url: str, store: str, client_id: str, token: str, first: str) -> None:
    """Submit until killed."""
    number = int(first)
    async with make_client(url, store, client_id, token) as client:
        tell("open")
        while True:
            await client.submit_fact(["P1"], "note", {"n": number})
            tell(f"taken {number}")
            number += 1
            if number % 10 == 0:
                await client.drained()


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
