"""Lists of names are counted before their names are looked at."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import pytest

from tests.beyond import Beyond, crossed
from tidings.core import names
from tidings.core.errors import InvalidName


@pytest.mark.bound("core.names._REPEATS_MAX")
@crossed
@pytest.mark.parametrize(
    ("check", "limit", "kind"),
    [
        (names.check_partitions, names.PARTITION_COUNT_MAX, "partitions"),
        (names.check_objects, names.OBJECT_COUNT_MAX, "objects"),
    ],
)
def test_a_far_longer_list_is_rejected_by_its_length(
    check: Callable[[Iterable[object]], tuple[str, ...]], limit: int, kind: str, beyond: Beyond
) -> None:
    """The error names the number, though every name is invalid too; a list that repeats one name within the limit is one name."""
    count = beyond(names._REPEATS_MAX * limit)
    with pytest.raises(InvalidName, match=f"names {count} {kind}; at most {limit}"):
        check([object()] * count)
    assert check(["order:1"] * (names._REPEATS_MAX * limit)) == ("order:1",)
