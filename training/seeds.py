"""Seeds of steps."""


def step_seed(seed: int, number: int) -> int:
    """The seed of a step's data, by its number."""
    # NumPy's older generators take 32 bits.
    return (seed * 1_000_003 + number) % 2**31
