"""Average of the last checkpoints, kept in memory (each rank holds its own shards)."""
from collections import deque

import torch


class LastAverage:
    def __init__(self, keep):
        self.kept = deque(maxlen=keep)

    def add(self, model):
        self.kept.append({n: p.detach() for n, p in model.named_parameters()})

    @torch.no_grad()
    def apply_to(self, model):
        """Puts the mean of the kept weights into the model."""
        means = {n: sum(s[n] for s in self.kept) / len(self.kept) for n in self.kept[-1]}
        for n, p in model.named_parameters():
            p.copy_(means[n])

    def state_dict(self):
        return {f"{i}": s for i, s in enumerate(self.kept)}

    def load_state_dict(self, state):
        self.kept.clear()
        for i in sorted(state, key=int):
            self.kept.append(state[i])
