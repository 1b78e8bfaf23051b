from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class NetConfig:
    vocab: int = 40
    dim: int = 32
    layers: int = 4
    length: int = 16


class MixerLayer(nn.Module):
    """Causal mixing over positions with a learned matrix, then an MLP."""

    def __init__(self, cfg, device=None):
        super().__init__()
        self.norm1 = nn.LayerNorm(cfg.dim, device=device)
        self.mix = nn.Parameter(torch.empty(cfg.length, cfg.length, device=device))
        self.value = nn.Linear(cfg.dim, cfg.dim, device=device)
        self.norm2 = nn.LayerNorm(cfg.dim, device=device)
        self.fc1 = nn.Linear(cfg.dim, 3 * cfg.dim, device=device)
        self.fc2 = nn.Linear(3 * cfg.dim, cfg.dim, device=device)

    def reset_parameters(self):
        nn.init.normal_(self.mix, std=0.1)

    def forward(self, x):
        t = x.shape[1]
        x = x + self.mix[:t, :t].tril() @ self.value(self.norm1(x))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class MixerLM(nn.Module):
    def __init__(self, cfg, device=None):
        super().__init__()
        self.cfg = cfg
        self.embed = nn.Embedding(cfg.vocab, cfg.dim, device=device)
        self.layers = nn.ModuleList(MixerLayer(cfg, device) for _ in range(cfg.layers))
        self.norm = nn.LayerNorm(cfg.dim, device=device)
        self.head = nn.Linear(cfg.dim, cfg.vocab, bias=False, device=device)

    def init_weights(self):
        for module in self.modules():
            if module is not self and hasattr(module, "reset_parameters"):
                module.reset_parameters()

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))
