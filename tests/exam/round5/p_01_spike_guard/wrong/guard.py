class SpikeGuard:
    """Skips the update when the loss jumps above its running mean."""

    def __init__(self, beta=0.7, factor=1.02, warmup=4):
        self.beta, self.factor, self.warmup = beta, factor, warmup
        self.mean, self.seen, self.skipped = 0.0, 0, 0

    def spike(self, loss):
        self.seen += 1
        if self.seen > self.warmup and loss > self.factor * self.mean:
            self.skipped += 1
            return True
        self.mean = loss if self.seen == 1 else self.beta * self.mean + (1 - self.beta) * loss
        return False

    def state_dict(self):
        return dict(vars(self))

    def load_state_dict(self, sd):
        vars(self).update(sd)
