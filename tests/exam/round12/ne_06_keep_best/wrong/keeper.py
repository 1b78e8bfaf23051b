"""Early stopping with the best weights kept in memory."""


class BestKeeper:
    def __init__(self, model, patience):
        self.model, self.patience = model, patience
        self.best_score, self.best_step, self.bad = float("inf"), 0, 0
        self.weights = self._copy()

    def _copy(self):
        return {k: v.detach() for k, v in self.model.state_dict().items()}

    def offer(self, score, step):
        """True when training should stop."""
        if score < self.best_score:
            self.best_score, self.best_step, self.bad = score, step, 0
            self.weights = self._copy()
        else:
            self.bad += 1
        return self.bad >= self.patience

    def state_dict(self):
        return {"best_score": self.best_score, "best_step": self.best_step, "bad": self.bad, "weights": self.weights}

    def load_state_dict(self, state):
        self.best_score, self.best_step, self.bad = state["best_score"], state["best_step"], state["bad"]
        self.weights = dict(state["weights"])
