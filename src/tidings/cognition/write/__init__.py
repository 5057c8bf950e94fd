"""The write workflow: from an admitted write to a stored memory, its receipt and the events about it."""

from .handler import WriteHandler
from .policy import SpacePolicy, StaticSpacePolicy
from .receipts import Ed25519Signer, HmacSigner, Receipt, is_genuine
from .requests import ConsolidationSettings, MergeStrategy, OutboxSettings, WriteSettings
from .store import CommittedWrite, Memory, MemoryStore

__all__ = [
    "CommittedWrite",
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
