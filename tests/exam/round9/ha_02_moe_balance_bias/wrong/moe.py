import torch
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.up = nn.Linear(dim, hidden)
        self.gate = nn.Linear(dim, hidden)
        self.down = nn.Linear(hidden, dim)

    def forward(self, x):
        return self.down(F.silu(self.gate(x)) * self.up(x))


class BalancedMoE(nn.Module):
    """Top-k routing, balanced without an auxiliary loss: a bias per expert takes part in the choice of
    the experts (not in their weights) and is nudged after each step according to the load."""

    def __init__(self, dim, hidden, n_experts, top_k, bias_rate):
        super().__init__()
        self.top_k, self.bias_rate = top_k, bias_rate
        self.router = nn.Linear(dim, n_experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(n_experts))
        self.register_buffer("balance_bias", torch.zeros(n_experts))
        self.register_buffer("load", torch.zeros(n_experts), persistent=False)

    def forward(self, x):
        flat = x.reshape(-1, x.shape[-1])
        scores = torch.sigmoid(self.router(flat))
        chosen = (scores.detach() + self.balance_bias).topk(self.top_k, dim=-1).indices
        weights = scores.gather(1, chosen)
        weights = weights / weights.sum(-1, keepdim=True)
        gates = torch.zeros_like(scores).scatter(1, chosen, weights)
        if self.training:
            self.load += torch.bincount(chosen.flatten(), minlength=len(self.experts))
        out = torch.zeros_like(flat)
        for e, expert in enumerate(self.experts):
            out = out + gates[:, e:e + 1] * expert(flat)
        return out.view_as(x)

    @torch.no_grad()
    def update_bias(self):
        load = self.load.clone()
        self.balance_bias += self.bias_rate * torch.sign(load.mean() - load)
        self.load.zero_()
        return load


class Layer(nn.Module):
    def __init__(self, dim, hidden, n_experts, top_k, bias_rate):
        super().__init__()
        self.norm1 = nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.norm2 = nn.LayerNorm(dim)
        self.moe = BalancedMoE(dim, hidden, n_experts, top_k, bias_rate)

    def forward(self, x):
        x = x + self.mix(self.norm1(x))[0]
        return x + self.moe(self.norm2(x))


class MoELM(nn.Module):
    def __init__(self, vocab, dim=24, hidden=32, layers=2, n_experts=6, top_k=2, bias_rate=0.02):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, hidden, n_experts, top_k, bias_rate) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.out(self.norm(x))

    def update_biases(self):
        return [layer.moe.update_bias() for layer in self.layers]
