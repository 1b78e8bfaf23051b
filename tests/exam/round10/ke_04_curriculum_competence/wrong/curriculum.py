import torch


class CompetenceCurriculum:
    """Raises the difficulty (number of digits in the sums) once the smoothed loss falls below a threshold."""

    def __init__(self, levels, threshold, beta=0.7, patience=2):
        self.levels, self.threshold, self.beta, self.patience = levels, threshold, beta, patience
        self.level = 1
        self.smooth = None
        self.good = 0

    def update(self, loss):
        self.smooth = loss if self.smooth is None else self.beta * self.smooth + (1 - self.beta) * loss
        self.good = self.good + 1 if self.smooth < self.threshold else 0
        if self.good >= self.patience and self.level < self.levels:
            self.level += 1
            self.smooth, self.good = None, 0

    def state_dict(self):
        return {"level": self.level, "smooth": -1.0 if self.smooth is None else self.smooth, "good": self.good}

    def load_state_dict(self, state):
        self.level, self.good = state["level"], state["good"]
        self.smooth = None if state["smooth"] < 0 else state["smooth"]


def draw(curriculum, step, batch, width, seed):
    """Sequences `a` and a position-wise carry-free sum; harder levels use more of the positions."""
    g = torch.Generator().manual_seed(seed * 7919 + step)
    a = torch.randint(0, 10, (batch, width), generator=g)
    b = torch.randint(0, 10, (batch, width), generator=g)
    length = torch.randint(max(1, curriculum.level - 1), curriculum.level + 1, (batch, 1), generator=g)
    used = torch.arange(width) < length
    a, b = torch.where(used, a, 0), torch.where(used, b, 0)
    return torch.cat([a, b + 10], 1), a // 2 + b // 2
