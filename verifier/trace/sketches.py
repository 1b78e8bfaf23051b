"""Arithmetic on sketches: [sum of squares, projections ...] of tensors
(probe/tensor_fingerprint.py).
"""

import math

Sketch = list[float]


def difference(a: Sketch, b: Sketch) -> float:
    """Estimated |a - b| of two tensors from their sketches."""
    return math.sqrt(
        3.0 * math.fsum((x - y) ** 2 for x, y in zip(a[1:], b[1:], strict=True)) / (len(a) - 1)
    )


def add(a: Sketch | None, b: Sketch) -> Sketch:
    """The sketch of two parts of a tensor together; None is an empty part."""
    return list(b) if a is None else [x + y for x, y in zip(a, b, strict=True)]


def of_number(value: float) -> Sketch:
    """The sketch of a single number."""
    return [value * value, value, value, value, value]
