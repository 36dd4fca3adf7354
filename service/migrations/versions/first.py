"""The tables of the first release.

Until that release, `tables.py` defines them here too, and a database of an earlier state is not upgraded. The second
migration needs the released tables written out here, since `tables.py` then has the later ones.
"""

from alembic import op
from redline.service.tables import METADATA

revision = "1"
down_revision = None


def upgrade() -> None:
    """Creates the tables."""
    METADATA.create_all(op.get_bind())
