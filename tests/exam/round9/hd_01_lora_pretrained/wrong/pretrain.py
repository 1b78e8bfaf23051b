"""Produces the base checkpoint. Stands in for a download: only rank 0 has the file."""
import torch
import torch.nn.functional as F

from data import sequences
from model import TinyLM


def pretrained_base(steps=60):
    with torch.random.fork_rng():
        torch.manual_seed(100)
        base = TinyLM()
        opt = torch.optim.AdamW(base.parameters(), lr=4e-3)
        for step in range(steps):
            ids = sequences(32, 17, stride=3, seed=step)
            loss = F.cross_entropy(base(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
            opt.zero_grad()
            loss.backward()
            opt.step()
    return {k: v.detach() for k, v in base.state_dict().items()}
