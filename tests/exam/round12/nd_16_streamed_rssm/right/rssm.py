import torch
import torch.nn as nn


class LatentDynamics(nn.Module):
    """Predicts the next observation from the memory of the episode so far."""

    def __init__(self, dim=6, act=2, hidden=32):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Linear(dim + act, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.predict = nn.Linear(hidden, dim)

    def forward(self, memory, obs, act, first):
        """Sum of squared one-step errors over the scored entries of a chunk, and the memory after it."""
        total = 0.0
        for t in range(len(obs)):
            go_on = (~first[t]).float()[:, None]
            guess = self.predict(memory)
            total = total + (go_on * (guess - obs[t]).pow(2)).sum()
            memory = self.cell(torch.tanh(self.embed(torch.cat([obs[t], act[t]], -1))), memory * go_on)
        return total, memory
