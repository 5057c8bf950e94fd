"""A plugin plays a track while a display follows. Run it again: the ledger knows the track already."""

import asyncio

from tidings.happenings.variants import CustodyReleased, CustodyStateReported, CustodyTaken
from tidings.ledger import Assignment, Correction, HealthStatus, Ledger, Manifest, Plugin, open_ledger, parse_catalogue

CATALOGUE = parse_catalogue('schema_version = 1\n[[subjects]]\nname = "track"')


class Player:
    plugin: Plugin

    async def take_custody(self, assignment: Assignment) -> None:
        await self.plugin.report_custody_state(assignment.handle_id, HealthStatus.HEALTHY, b"0:00")

    async def correct_course(self, correction: Correction) -> None:
        await self.plugin.report_custody_state(correction.handle_id, HealthStatus.HEALTHY, correction.payload)

    async def release_custody(self, handle_id: str) -> None:
        pass  # the music stops


async def display(ledger: Ledger) -> None:
    async for envelope in ledger.happenings.subscribe():
        match envelope.happening:
            case CustodyTaken(custody_type=kind, shelf=shelf):
                print(f"{kind} on {shelf}")
            case CustodyStateReported(health=health):
                print(f"it is {health}")
            case CustodyReleased():
                print("over")


async def main() -> None:
    async with await open_ledger("workspace", catalogue=CATALOGUE) as ledger:
        player = Player()
        player.plugin = ledger.plugin("org.example.player", player, Manifest(shelves=("audio.playback",)))
        announced = await player.plugin.announce_subject("track", [("file", "/music/a.flac")])
        print(f"the track is {'new' if announced.kind == 'created' else 'known'}")
        showing = asyncio.create_task(display(ledger))
        await asyncio.sleep(0)
        handle = await ledger.plugins.take_custody("audio.playback", "playback")
        await ledger.plugins.correct_course("audio.playback", handle.id, "seek", b"1:30")
        custody = await ledger.plugins.release_custody("audio.playback", handle.id)
    await showing
    if custody.last_state is not None:
        print(f"it stopped at {custody.last_state.payload.decode()}")


asyncio.run(main())
