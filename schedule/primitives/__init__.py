"""The primitives, grouped by kind; methods of `Schedule`."""
