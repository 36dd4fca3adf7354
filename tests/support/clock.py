"""A clock that tests advance."""


class Clock:
    """A clock that moves only by `pass_by`."""

    def __init__(self):
        self.now = 1_000_000.0

    def __call__(self):
        return self.now

    def pass_by(self, seconds):
        self.now += seconds
