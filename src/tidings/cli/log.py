"""``tidings log``: the commit log itself. One module a verb, or a few verbs that belong together."""

from __future__ import annotations

import typer

from .append import register as register_append
from .export import register as register_export
from .reading import register as register_reading
from .repair import register as register_repair
from .retention import register as register_retention
from .stats import register as register_stats
from .verify import register as register_verify

__all__ = ["app"]

app = typer.Typer(help="Append to, read and look after the log.", rich_markup_mode=None)

for register in (
    register_append,
    register_reading,
    register_stats,
    register_verify,
    register_repair,
    register_export,
    register_retention,
):
    register(app)
