"""The write workflow: from an admitted write to a stored memory, its receipt and what is told about it."""

from .handler import WriteHandler
from .receipts import Ed25519Signer, HmacSigner, Receipt, is_genuine
from .settings import ConsolidationSettings, MergeStrategy, OutboxSettings, WriteSettings
from .spaces import SpacePolicy, StaticSpacePolicy
from .store import Committed, Memory, MemoryStore

__all__ = [
    "Committed",
    "ConsolidationSettings",
    "Ed25519Signer",
    "HmacSigner",
    "Memory",
    "MemoryStore",
    "MergeStrategy",
    "OutboxSettings",
    "Receipt",
    "SpacePolicy",
    "StaticSpacePolicy",
    "WriteHandler",
    "WriteSettings",
    "is_genuine",
]
