import math


class Ramp:
    """Global batch size and learning rate as functions of the samples seen so far."""

    def __init__(self, sizes=((0, 8), (64, 16), (192, 48)), total=640, lr=6e-3):
        self.sizes, self.total, self.lr = sizes, total, lr

    def batch_size(self, seen):
        size = [s for start, s in self.sizes if seen >= start][-1]
        return min(size, self.total - seen)

    def rate(self, seen, size):
        """Square-root scaling with the batch; warm-up, plateau, and decay over the last third."""
        warm = min(1.0, (seen + size) / 64)
        left = min(1.0, (self.total - seen) / (self.total / 3))
        return self.lr * math.sqrt(size / 48) * warm * left
