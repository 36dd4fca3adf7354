"""English texts for tests of data."""

from pydoc_data.topics import topics

TOPICS = [topics[name] for name in sorted(topics)]
"""English texts that come with Python: its own documentation."""
