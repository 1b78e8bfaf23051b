"""How likely samples that are drawn at random explain what a run shows."""

import math


def log_equal_batches(size: int, samples: int) -> float:
    """The logarithm of the probability that two batches of a size, drawn from so many samples, are
    the same one.
    """
    return math.lgamma(size + 1) - size * math.log(samples)


def log_shared(shared: int, batch: int, samples: int) -> float:
    """The logarithm of a bound of the probability that two batches, each drawn from so many
    samples, share at least so many.
    """
    ways = math.lgamma(batch + 1) - math.lgamma(shared + 1) - math.lgamma(batch - shared + 1)
    return min(0.0, ways + shared * math.log(min(1.0, batch / max(samples, 1))))
