"""The ledger: authoritative stores that are folded from the log, and whose every change is told as a happening."""

from tidings.happenings.variants import HealthStatus

from .admins import Admin
from .catalogue import Catalogue, load_catalogue, parse_catalogue
from .commands import Command, CommandOutcome
from .composing import ProjectionScope
from .errors import ErrorClass, LedgerError, PluginFailure
from .following import SubjectSubscription, SubjectUpdate
from .handlers import (
    Assignment,
    Correction,
    CorrectionFailure,
    InstancePolicy,
    InteractionKind,
    Manifest,
    PluginRequest,
    Respondent,
    Warden,
)
from .ledger import Ledger, open_ledger
from .paging import ListPage
from .plugins import CustodyHandle, Plugin
from .relations import WalkDirection
from .settings import LedgerSettings
from .state import LedgerState, Part

__all__ = [
    "Admin",
    "Assignment",
    "Catalogue",
    "Command",
    "CommandOutcome",
    "Correction",
    "CorrectionFailure",
    "CustodyHandle",
    "ErrorClass",
    "HealthStatus",
    "InstancePolicy",
    "InteractionKind",
    "Ledger",
    "LedgerError",
    "LedgerSettings",
    "LedgerState",
    "ListPage",
    "Manifest",
    "Part",
    "Plugin",
    "PluginFailure",
    "PluginRequest",
    "ProjectionScope",
    "Respondent",
    "SubjectSubscription",
    "SubjectUpdate",
    "WalkDirection",
    "Warden",
    "load_catalogue",
    "open_ledger",
    "parse_catalogue",
]
