"""Latest-weight averaging: the mean of the last K snapshots, kept as shards."""
from collections import deque

import torch


class Lawa:
    def __init__(self, k):
        self.k = k
        self.window = deque(maxlen=k)

    def push(self, model):
        self.window.append({n: w.detach() for n, w in model.state_dict().items()})

    @torch.no_grad()
    def average(self):
        out = {}
        for n in self.window[0]:
            out[n] = sum(s[n] for s in self.window) / len(self.window)
        return out

    def state_dict(self):
        return {str(i): dict(s) for i, s in enumerate(self.window)}

    def template(self, model, count):
        self.window.clear()
        for _ in range(count):
            self.push(model)
        return self.state_dict()
