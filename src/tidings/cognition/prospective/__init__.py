"""Prospective memory: triggers that fire later, when the moment is fit."""

from .runner import ProspectiveTrigger, RunnerSettings, TriggerRunner, fold
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
