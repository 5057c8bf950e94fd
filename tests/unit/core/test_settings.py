"""Settings are checked in one way: the error names the setting, its value and what is allowed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any, Literal

import msgspec
import pytest

from tidings.core.errors import SettingsError
from tidings.core.settings import Settings, checked, settings_from


class Inner(Settings, frozen=True, kw_only=True):
    """A part with a range, and two values that must fit."""

    low: Annotated[int, msgspec.Meta(ge=1, le=9)] = 1
    high: Annotated[float, msgspec.Meta(gt=0)] | None = 5.0
    secret: Annotated[str, msgspec.Meta(max_length=3)] | None = None

    def conflicts(self) -> Iterator[tuple[str, str]]:
        """Low above high."""
        if self.high is not None and self.low > self.high:
            yield "low", "is above high"


class Outer(Settings, frozen=True, kw_only=True):
    """A whole with a part."""

    mode: Literal["fast", "safe"] = "safe"
    inner: Inner = Inner()
    many: tuple[int, ...] = ()


@pytest.mark.parametrize(
    ("settings", "path", "says", "hint"),
    [
        (Outer(inner=Inner(low=10)), "node.inner.low", "10", "a whole number at least 1 and at most 9"),
        (Outer(inner=Inner(high=-1.0)), "node.inner.high", "-1.0", "a number more than 0 or nothing"),
        (Outer(mode="slow"), "node.mode", "'slow'", "one of fast, safe"),  # type: ignore[arg-type]
        (Outer(many=("x",)), "node.many[0]", "Expected `int`, got `str`", None),  # type: ignore[arg-type]
        (Outer(inner=Inner(low=7)), "node.inner.low", "is above high", None),
        (Outer(mode=object()), "node", "object", None),  # type: ignore[arg-type]
    ],
)
def test_an_error_names_the_setting_its_value_and_what_is_allowed(
    settings: Outer, path: str, says: str, hint: str | None
) -> None:
    """Whether a value is out of range, of another type, or does not fit its neighbours."""
    with pytest.raises(SettingsError) as refused:
        checked(settings, "node")

    assert refused.value.path == path
    assert says in refused.value.problem
    assert refused.value.hint == (f"give {hint}" if hint else None)


def test_no_error_shows_a_secret() -> None:
    """Neither its message nor its hint."""
    with pytest.raises(SettingsError) as refused:
        checked(Outer(inner=Inner(secret="hunter2")))

    assert refused.value.path == "inner.secret"
    assert "hunter2" not in f"{refused.value} {refused.value.hint}"


@pytest.mark.parametrize(("values", "fits"), [({"inner": {"low": "3"}}, True), ({"inner": {"low": "x"}}, False)])
def test_text_stands_for_a_number_where_values_come_from_the_environment(values: dict[str, Any], fits: bool) -> None:
    """Unless it is none."""
    if fits:
        assert settings_from(Outer, values).inner.low == 3
    else:
        with pytest.raises(SettingsError, match=r"inner\.low.*'x'"):
            settings_from(Outer, values)
