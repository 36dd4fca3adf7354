"""The service's state in SQL: users, searches, dry runs and their leases, workers, events. Every method is one
transaction.
"""

from .store import Store

__all__ = ["Store"]
