"""
The commit log: the one truth that everything else is derived from.

``interface`` says what every engine promises; ``memory`` is the model, ``embedded`` the one on files.
This package imports no engine, so that ``segment`` and ``record`` can be used where there is no loop
(on a Spark executor, for one).
"""

from .interface import Appended, Authorise, Duplicate, Health, Log, Page, Position, Query, Refused, TopicInfo, Verdict
from .record import Record, RecordMeta
from .settings import LogSettings, TopicRetention

__all__ = [
    "Appended",
    "Authorise",
    "Duplicate",
    "Health",
    "Log",
    "LogSettings",
    "Page",
    "Position",
    "Query",
    "Record",
    "RecordMeta",
    "Refused",
    "TopicInfo",
    "TopicRetention",
    "Verdict",
]
