"""Devices that trials of several runners share: one trial uses a device at a time."""

import threading

import pytest
from redline.runners.place.local import SharedDevices


def test_devices_are_taken_in_order_and_given_back():
    shared = SharedDevices(["0", "1", "2", "3"])
    first, second = shared.take(2), shared.take(1)
    assert (first, second) == (("0", "1"), ("2",))
    shared.give_back(first, 2)
    assert shared.take(3) == ("0", "1", "3")


@pytest.mark.parametrize("ids", [[str(at) for at in range(12)], ["GPU-f0", "GPU-a1", "GPU-c2", "GPU-b3", "GPU-00"]])
def test_devices_that_were_given_back_keep_the_order_of_the_machine(ids):
    shared = SharedDevices(ids)
    shared.give_back(shared.take(4), 4)
    assert shared.take(4) == tuple(ids[:4])


def test_a_trial_waits_for_enough_free_devices():
    shared, taken = SharedDevices(["0", "1"]), []
    held = shared.take(1)
    waiting = threading.Thread(target=lambda: taken.append(shared.take(2)))
    waiting.start()
    waiting.join(0.1)
    assert not taken
    shared.give_back(held, 1)
    waiting.join(10.0)
    assert taken == [("0", "1")]


def test_devices_without_names_are_counted():
    shared = SharedDevices(count=1)
    assert shared.take(1) == ()
    waiting = threading.Thread(target=lambda: shared.take(1))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    shared.give_back((), 1)
    waiting.join(10.0)
    assert not waiting.is_alive()
