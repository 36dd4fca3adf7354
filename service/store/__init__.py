"""The service's state in SQL: users, searches, their devices, events. Every method is one transaction."""

from .store import Store

__all__ = ["Store"]
