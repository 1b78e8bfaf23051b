class PlateauRate:
    """Multiplies the learning rate by `factor` when the watched value has not improved `patience` times in a row."""

    def __init__(self, optimizer, factor=0.5, patience=1, threshold=0.01):
        self.optimizer, self.factor, self.patience, self.threshold = optimizer, factor, patience, threshold
        self.best, self.bad, self.cuts = float("inf"), 0, 0

    def observe(self, value):
        if value < self.best * (1 - self.threshold):
            self.best, self.bad = value, 0
            return False
        self.bad += 1
        if self.bad <= self.patience:
            return False
        for group in self.optimizer.param_groups:
            group["lr"] *= self.factor
        self.bad = 0
        self.cuts += 1
        return True

    def state_dict(self):
        return {"best": self.best, "bad": self.bad, "cuts": self.cuts}

    def load_state_dict(self, state):
        self.best, self.bad, self.cuts = state["best"], state["bad"], state["cuts"]
