import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F


class Expert(nn.Module):
    def __init__(self, dim, hidden):
        super().__init__()
        self.w1, self.w2 = nn.Linear(dim, hidden, bias=False), nn.Linear(hidden, dim, bias=False)

    def forward(self, x):
        return self.w2(F.gelu(self.w1(x)))


class BiasRoutedMoE(nn.Module):
    """Top-2 mixture of experts, balanced by a bias on the routing scores in place of an auxiliary loss.

    The bias only chooses the experts; the mixing weights come from the plain scores. After every step
    `update_bias` moves it against the load that the experts had in that step.
    """

    def __init__(self, dim, hidden, experts, top_k=2):
        super().__init__()
        self.gate = nn.Linear(dim, experts, bias=False)
        self.experts = nn.ModuleList(Expert(dim, hidden) for _ in range(experts))
        self.top_k = top_k
        self.register_buffer("route_bias", torch.zeros(experts))
        self.register_buffer("load", torch.zeros(experts), persistent=False)

    def forward(self, x):
        scores = torch.sigmoid(self.gate(x))
        chosen = (scores + self.route_bias).topk(self.top_k, dim=-1).indices
        mask = torch.zeros_like(scores).scatter(-1, chosen, 1.0)
        if self.training:
            self.load += mask.detach().flatten(0, -2).sum(0)
        mix = scores * mask
        mix = mix / mix.sum(-1, keepdim=True)
        return sum(mix[..., i:i + 1] * expert(x) for i, expert in enumerate(self.experts))

    @torch.no_grad()
    def update_bias(self, rate):
        dist.all_reduce(self.load)
        self.route_bias += rate * torch.sign(self.load.mean() - self.load)
        self.load.zero_()


class Layer(nn.Module):
    def __init__(self, dim, experts):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mix = nn.GRU(dim, dim, batch_first=True)
        self.moe = BiasRoutedMoE(dim, 2 * dim, experts)

    def forward(self, x):
        x = x + self.mix(self.n1(x))[0]
        return x + self.moe(self.n2(x))


class MoELM(nn.Module):
    def __init__(self, vocab=32, dim=24, layers=2, experts=4):
        super().__init__()
        self.tok = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList(Layer(dim, experts) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        h = self.tok(ids)
        for layer in self.layers:
            h = layer(h)
        return self.out(self.norm(h))

    def moe_layers(self):
        return [m for m in self.modules() if isinstance(m, BiasRoutedMoE)]
