"""Results of a search: measurements, the ledger, trials.csv and the files derived from them."""

from .ledger import Ledger
from .measurement import Measurement, RankReport, Status, Trial
from .run import RunFolder, View
from .table import frame as table_frame, read as read_table

__all__ = [
    "Ledger",
    "Measurement",
    "RankReport",
    "RunFolder",
    "Status",
    "Trial",
    "View",
    "read_table",
    "table_frame",
]
