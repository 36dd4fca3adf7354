"""What is known: measurements, the ledger, trials.csv and what is made from them."""

from .measurement import Measurement, RankReport, Status, Trial

__all__ = ["Measurement", "RankReport", "Status", "Trial"]
