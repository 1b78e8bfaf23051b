import torch
import torch.nn as nn
import torch.nn.functional as F


class MoE(nn.Module):
    """Dense-dispatch mixture of experts, expert weights stacked in one tensor."""

    def __init__(self, dim, experts, hidden):
        super().__init__()
        self.gate = nn.Parameter(torch.empty(experts, dim))
        self.w_in = nn.Parameter(torch.empty(experts, hidden, dim))
        self.w_out = nn.Parameter(torch.empty(experts, dim, hidden))

    def forward(self, x):
        p = F.softmax(x @ self.gate.t(), -1)
        top, idx = p.topk(2, -1)
        p = torch.zeros_like(p).scatter(-1, idx, top / top.sum(-1, keepdim=True))
        h = F.relu(torch.einsum("btd,ehd->bteh", x, self.w_in))
        y = torch.einsum("bteh,edh->bted", h, self.w_out)
        return (y * p.unsqueeze(-1)).sum(2)


class Layer(nn.Module):
    def __init__(self, dim, experts, hidden):
        super().__init__()
        self.mix = nn.Parameter(torch.empty(dim, 2 * dim))
        self.moe = MoE(dim, experts, hidden)

    def forward(self, x):
        prev = F.pad(x, (0, 0, 1, 0))[:, :-1]
        x = x + torch.cat([x, prev], -1) @ self.mix.t()
        return x + self.moe(F.layer_norm(x, x.shape[-1:]))


class MoELM(nn.Module):
    def __init__(self, vocab=32, dim=24, layers=2, experts=4, hidden=32):
        super().__init__()
        self.embed = nn.Parameter(torch.empty(vocab, dim))
        self.layers = nn.ModuleList(Layer(dim, experts, hidden) for _ in range(layers))
        self.head = nn.Parameter(torch.empty(vocab, dim))

    def forward(self, tok):
        x = F.embedding(tok, self.embed)
        for layer in self.layers:
            x = layer(x)
        return F.layer_norm(x, x.shape[-1:]) @ self.head.t()
