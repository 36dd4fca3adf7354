"""Seeds of steps."""


def step_seed(seed: int, number: int) -> int:
    """Seed of a step's data, by the step's number."""
    # NumPy's older generators take 32 bits.
    return (seed * 1_000_003 + number) % 2**31
