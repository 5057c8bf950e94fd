"""The bus: durable consumer groups over the log."""

from .eventbus import EventBus
from .events import Ack, Nack, ReceivedEvent
from .life import EventBusState
from .once import KeyMemory, once
from .publisher import Publisher, PublisherSettings, PublishResult
from .settings import Backoff, BusSettings, SubscriptionSettings, TopicPolicy
from .store import DeadLetter
from .subscription import Subscription, SubscriptionRegistry

__all__ = [
    "Ack",
    "Backoff",
    "BusSettings",
    "DeadLetter",
    "EventBus",
    "EventBusState",
    "KeyMemory",
    "Nack",
    "PublishResult",
    "Publisher",
    "PublisherSettings",
    "ReceivedEvent",
    "Subscription",
    "SubscriptionRegistry",
    "SubscriptionSettings",
    "TopicPolicy",
    "once",
]
