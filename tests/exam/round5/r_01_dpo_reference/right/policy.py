import torch
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard

from data import LENGTH, VOCAB


class Layer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.norm = nn.LayerNorm(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        h = self.norm(x)
        t = torch.arange(1, h.shape[1] + 1, dtype=h.dtype).view(1, -1, 1)
        return x + self.ff(h + h.cumsum(1) / t)


class Policy(nn.Module):
    def __init__(self, d=24, depth=2):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, d)
        self.pos = nn.Parameter(torch.randn(LENGTH, d) * 0.02)
        self.layers = nn.ModuleList(Layer(d) for _ in range(depth))
        self.out = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.out(x)


def build_policy(seed=0):
    """The 'SFT' model: the seed plays the part of the pretrained weights."""
    torch.manual_seed(seed)
    model = Policy()
    for layer in model.layers:
        fully_shard(layer)
    return fully_shard(model)


def frozen_copy(model):
    twin = build_policy()
    set_model_state_dict(twin, get_model_state_dict(model))
    return twin.eval().requires_grad_(False)
