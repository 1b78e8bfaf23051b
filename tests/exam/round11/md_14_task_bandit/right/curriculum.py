import math

import numpy as np


class Exp3:
    """Adversarial bandit over tasks; the reward of a task is its relative learning progress.

    All ranks hold a copy and make the same choices, so they must be fed the same (global) losses.
    """

    def __init__(self, arms, gamma=0.3, seed=0):
        self.gamma, self.log_w = gamma, np.zeros(arms)
        self.rng = np.random.default_rng(seed)
        self.last = [None] * arms

    def probs(self):
        w = np.exp(self.log_w - self.log_w.max())
        return (1 - self.gamma) * w / w.sum() + self.gamma / len(w)

    def choose(self):
        return int(self.rng.choice(len(self.log_w), p=self.probs()))

    def learn(self, arm, loss):
        if self.last[arm] is not None:
            progress = math.tanh(3 * (self.last[arm] - loss) / self.last[arm])
            self.log_w[arm] += self.gamma * progress / (self.probs()[arm] * len(self.log_w))
        self.last[arm] = loss

    def state_dict(self):
        return {"log_w": self.log_w.tolist(), "rng": self.rng.bit_generator.state, "last": self.last}

    def load_state_dict(self, s):
        self.log_w, self.last = np.array(s["log_w"]), list(s["last"])
        self.rng.bit_generator.state = s["rng"]
