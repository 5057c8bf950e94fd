"""Encrypt one person's payloads at rest; without the key a record is still there, and its payload is not."""

import asyncio
from pathlib import Path

from tidings.core.events import Event, EventMeta
from tidings.log import Query
from tidings.log.embedded import open_log
from tidings.log.encryption import AesGcmEncryptor
from tidings.log.errors import SealedPayload
from tidings.log.keys import KeyFile
from tidings.log.reading import records


def keys_of_alice() -> KeyFile:
    keys = KeyFile("keys.json") if Path("keys.json").exists() else KeyFile.create("keys.json")
    if keys.current("person:alice") is None:
        keys.add_key("person:alice")
    return keys


async def main() -> None:
    log = await open_log("workspace", encryptor=AesGcmEncryptor(keys_of_alice()))
    await log.append(Event(EventMeta("diary", "NOTED", "person:alice"), {"text": "nobody else reads this"}))
    async for record in records(log, Query(topic="diary")):
        print("with the key:", record.payload["text"])
    await log.close()

    log = await open_log("workspace")
    async for record in records(log, Query(topic="diary")):
        try:
            print(record.payload)
        except SealedPayload as error:
            print("without it:", error.code)
    await log.close()


asyncio.run(main())
