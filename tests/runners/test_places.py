"""Devices that trials of several runners share: each is one trial's at a time."""

import threading

from redline.runners.places import Places


def test_devices_are_taken_in_order_and_given_back():
    places = Places(["0", "1", "2", "3"])
    first, second = places.take(2), places.take(1)
    assert (first, second) == (("0", "1"), ("2",))
    places.give_back(first, 2)
    assert places.take(3) == ("0", "1", "3")


def test_who_wants_more_than_are_free_waits_for_them():
    places, taken = Places(["0", "1"]), []
    held = places.take(1)
    waiting = threading.Thread(target=lambda: taken.append(places.take(2)))
    waiting.start()
    waiting.join(0.1)
    assert not taken
    places.give_back(held, 1)
    waiting.join(10.0)
    assert taken == [("0", "1")]


def test_devices_without_names_are_counted():
    places = Places(count=1)
    assert places.take(1) == ()
    waiting = threading.Thread(target=lambda: places.take(1))
    waiting.start()
    waiting.join(0.1)
    assert waiting.is_alive()
    places.give_back((), 1)
    waiting.join(10.0)
    assert not waiting.is_alive()
