"""How likely samples that are drawn at random explain what a run shows."""

import math


def log_equal_batches(size: int, samples: int) -> float:
    """The logarithm of the probability that two batches of a size, drawn from so many samples, are
    the same one.
    """
    return math.lgamma(size + 1) - size * math.log(samples)
