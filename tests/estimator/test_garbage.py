import gc

import pytest
from redline.estimator.garbage import without_garbage_collection


def test_the_collector_is_off_within_and_as_it_was_behind_even_where_something_fails():
    assert gc.isenabled()
    with pytest.raises(KeyError), without_garbage_collection():
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
        raise KeyError
    assert gc.isenabled()
    gc.disable()
    try:
        with without_garbage_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()
