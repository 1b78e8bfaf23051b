"""All members of the ensemble in batched weights: dimension 0 is the member."""
import torch
import torch.nn as nn


class DynamicsEnsemble(nn.Module):
    def __init__(self, members, n_in, hidden, n_out):
        super().__init__()
        self.sizes = [(n_in, hidden), (hidden, hidden), (hidden, n_out)]
        self.weight = nn.ParameterList(nn.Parameter(torch.empty(members, i, o)) for i, o in self.sizes)
        self.bias = nn.ParameterList(nn.Parameter(torch.empty(members, 1, o)) for _, o in self.sizes)

    def forward(self, x):
        x = x.expand(self.weight[0].shape[0], *x.shape)
        for k, (w, b) in enumerate(zip(self.weight, self.bias)):
            x = torch.baddbmm(b, x, w)
            if k < len(self.sizes) - 1:
                x = torch.nn.functional.silu(x)
        return x

    @torch.no_grad()
    def init_members(self, seed, rank):
        """Initialise the members that live on this rank."""
        weights = [w.to_local() for w in self.weight]
        here = weights[0].shape[0]
        for i in range(here):
            g = torch.Generator().manual_seed(seed + rank * here + i)
            for w, (fan_in, _) in zip(weights, self.sizes):
                w[i].normal_(std=fan_in ** -0.5, generator=g)
        for b in self.bias:
            b.to_local().zero_()
