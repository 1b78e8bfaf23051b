import torch
import torch.nn as nn


class Forecaster(nn.Module):
    """Predicts the change of the next value; the recurrent state is handed in and out."""

    def __init__(self, hidden=24):
        super().__init__()
        self.hidden = hidden
        self.embed = nn.Linear(1, hidden)
        self.cell = nn.GRUCell(hidden, hidden)
        self.head = nn.Sequential(nn.Linear(hidden, hidden), nn.SiLU(), nn.Linear(hidden, 1))

    def fresh_state(self, streams):
        return torch.zeros(streams, self.hidden)

    def forward(self, x, state):
        outs = []
        emb = torch.tanh(self.embed(x))
        for t in range(x.size(1)):
            state = self.cell(emb[:, t], state)
            outs.append(state)
        return x + self.head(torch.stack(outs, 1)), state
