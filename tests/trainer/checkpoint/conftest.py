import pytest


@pytest.fixture(scope="session", autouse=True)
def _imported():
    # Imported once, before ranks are forked.
    import transformers.models.bert.modeling_bert
    import transformers.models.t5.modeling_t5  # noqa: F401
