"""Subscriptions, under the name the bus's document imports them by."""

from tidings.bus.subscription import Subscription, SubscriptionRegistry

__all__ = ["Subscription", "SubscriptionRegistry"]
