"""The bus's filters, under the name its document imports them by."""

from tidings.bus.filtering import *  # noqa: F403
from tidings.bus.filtering import __all__ as __all__
