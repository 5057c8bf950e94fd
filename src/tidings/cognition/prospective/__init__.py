"""Prospective memory: triggers that fire later, when the moment is fit."""

from .announcements import ProspectiveTrigger, fold
from .runner import RunnerSettings, TriggerRunner
from .triggers import Conditions, DailyTime, Interval, Once, Signals, Trigger, TriggerStatus, eligibility

__all__ = [
    "Conditions",
    "DailyTime",
    "Interval",
    "Once",
    "ProspectiveTrigger",
    "RunnerSettings",
    "Signals",
    "Trigger",
    "TriggerRunner",
    "TriggerStatus",
    "eligibility",
    "fold",
]
