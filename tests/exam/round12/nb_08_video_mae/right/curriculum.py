class MaskCurriculum:
    """Hides more of the clip while the model keeps getting better, a little less when it stalls."""

    def __init__(self, low=0.3, high=0.8, up=0.02, down=0.01):
        self.low, self.high, self.up, self.down = low, high, up, down
        self.ratio, self.smooth, self.seen = low, 0.0, 0

    def hidden(self, tokens):
        return max(1, round(self.ratio * tokens))

    def observe(self, loss):
        self.seen += 1
        self.smooth = loss if self.seen == 1 else 0.8 * self.smooth + 0.2 * loss
        change = self.up if loss <= self.smooth else -self.down
        self.ratio = min(self.high, max(self.low, self.ratio + change))

    def state_dict(self):
        return {"ratio": self.ratio, "smooth": self.smooth, "seen": self.seen}

    def load_state_dict(self, state):
        self.ratio, self.smooth, self.seen = state["ratio"], state["smooth"], state["seen"]
