"""Devices of concurrent trials: one trial uses a device at a time."""

import threading

import pytest
from redline.runners.place.local import FreeDevices


def test_devices_are_taken_in_order_and_given_back():
    devices = FreeDevices(["0", "1", "2", "3"])
    first, second = devices.take(2), devices.take(1)
    assert (first, second) == (("0", "1"), ("2",))
    devices.give_back(first, 2)
    assert devices.take(3) == ("0", "1", "3")


@pytest.mark.parametrize("ids", [[str(at) for at in range(12)], ["GPU-f0", "GPU-a1", "GPU-c2", "GPU-b3", "GPU-00"]])
def test_devices_that_were_given_back_keep_the_order_of_the_machine(ids):
    devices = FreeDevices(ids)
    devices.give_back(devices.take(4), 4)
    assert devices.take(4) == tuple(ids[:4])


def test_a_trial_waits_for_enough_free_devices():
    devices, taken = FreeDevices(["0", "1"]), []
    held = devices.take(1)
    waiting = threading.Thread(target=lambda: taken.append(devices.take(2)))
    waiting.start()
    waiting.join(0.1)
    assert not taken
    devices.give_back(held, 1)
    waiting.join(10.0)
    assert taken == [("0", "1")]


def test_devices_without_names_are_counted():
    devices = FreeDevices(count=1)
    assert devices.take(1) == ()
    waiting = threading.Thread(target=lambda: devices.take(1))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    devices.give_back((), 1)
    waiting.join(10.0)
    assert not waiting.is_alive()
