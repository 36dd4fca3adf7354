"""English texts and a chat template for tests of data."""

from pydoc_data.topics import topics

TOPICS = [topics[name] for name in sorted(topics)]
"""English texts that come with Python: its own documentation."""
MARKED = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
    "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}\n{% endfor %}"
)
