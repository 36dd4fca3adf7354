"""Spaces that are read from files of other tuners."""

from redline.frameworks.autotuners import find_source


def read(document, devices=1, **asked):
    return find_source(document).read(devices, **asked)


def values(space):
    """Values of each knob that is not derived."""
    return {knob.name: knob.values for knob in space.knobs if not knob.derived}


def left(found):
    """Reasons for settings that were not carried over, by name."""
    notes = [each.removeprefix("not carried over: ") for each in found.notes if each.startswith("not carried over: ")]
    return dict(each.split(": ", 1) for each in notes)
