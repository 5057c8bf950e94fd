"""The page of happenings follows from the declarations."""

from __future__ import annotations

from tidings.happenings.description import describe_variants
from tidings.happenings.happening import Happening, Plugin, Subject
from tools.happenings_page import Site, render


def test_a_variant_of_a_users_own_has_its_line() -> None:
    """Whoever declares a variant has a row for it, with its text, fields, filters, labels and the place that makes it."""

    class WindowBroken(Happening, frozen=True, kw_only=True):
        """A window broke."""

        plugin: Plugin
        window_id: Subject
        panes: int
        cause: str | None

    described = [each for each in describe_variants() if each.name == "window_broken"]
    page = render(described, [Site("window_broken", "house/windows.py", "watch")], {})

    assert (
        "| `window_broken` | A window broke. | `plugin`; `window_id`; `panes`: whole number; `cause`: text or null "
        "| `plugin` | - | `window_id` | `plugin`, `window_id`, `panes` | `house/windows.py` (`watch`) |\n"
    ) in page
