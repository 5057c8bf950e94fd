"""The bus's middleware, under the name its document imports it by."""

from tidings.bus.middleware import *  # noqa: F403
from tidings.bus.middleware import __all__ as __all__
