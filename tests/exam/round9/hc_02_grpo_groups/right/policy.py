import torch
import torch.nn as nn


class GRUPolicy(nn.Module):
    """Small autoregressive policy: an embedding, a GRU cell and a head."""

    def __init__(self, vocab=16, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.inp = nn.Linear(dim, 3 * dim)
        self.rec = nn.Linear(dim, 3 * dim)
        self.head = nn.Linear(dim, vocab)
        self.dim = dim

    def cell(self, token, h):
        xr, xz, xn = self.inp(self.embed(token)).chunk(3, -1)
        hr, hz, hn = self.rec(h).chunk(3, -1)
        r, z = torch.sigmoid(xr + hr), torch.sigmoid(xz + hz)
        return (1 - z) * torch.tanh(xn + r * hn) + z * h

    def forward(self, prompt, uniforms=None, actions=None):
        """Samples by inverse CDF when `uniforms` is given, else scores `actions`. Returns actions, logp."""
        h = prompt.new_zeros(prompt.shape[0], self.dim, dtype=torch.float32)
        for t in range(prompt.shape[1] - 1):
            h = self.cell(prompt[:, t], h)
        token, taken, logps = prompt[:, -1], [], []
        steps = (uniforms if actions is None else actions).shape[1]
        for t in range(steps):
            h = self.cell(token, h)
            logp = self.head(h).log_softmax(-1)
            if actions is None:
                cdf = logp.exp().cumsum(-1)
                token = (cdf < uniforms[:, t:t + 1]).sum(-1).clamp(max=logp.shape[-1] - 1)
            else:
                token = actions[:, t]
            taken.append(token)
            logps.append(logp.gather(-1, token[:, None]).squeeze(-1))
        return torch.stack(taken, 1), torch.stack(logps, 1)
