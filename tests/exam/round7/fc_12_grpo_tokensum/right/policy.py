import torch
import torch.nn as nn

VOCAB, DIM, BOS, EOS = 12, 24, 0, 1


class Refine(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(DIM), nn.Linear(DIM, 2 * DIM), nn.Linear(2 * DIM, DIM)

    def forward(self, h):
        return h + self.down(torch.tanh(self.up(self.norm(h))))


class Policy(nn.Module):
    """A tiny recurrent language model."""

    def __init__(self):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, DIM)
        self.mix = nn.Linear(2 * DIM, DIM)
        self.refine = Refine()
        self.out = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.emb(ids)
        h = torch.zeros_like(x[:, 0])
        states = []
        for t in range(ids.shape[1]):
            h = torch.tanh(self.mix(torch.cat([h, x[:, t]], -1)))
            states.append(h)
        h = torch.stack(states, 1)
        return self.out(self.refine(h)).log_softmax(-1)


@torch.no_grad()
def sample(policy, uniforms):
    """Inverse-CDF sampling from given uniforms [n, T]; returns ids [n, T+1] and the mask of generated tokens (EOS included)."""
    n, length = uniforms.shape
    ids = torch.full((n, 1), BOS)
    alive = torch.ones(n, dtype=torch.bool)
    mask = []
    for t in range(length):
        cdf = policy(ids)[:, -1].double().exp().cumsum(-1)
        tok = torch.searchsorted(cdf, uniforms[:, t:t + 1] * cdf[:, -1:]).clamp(max=VOCAB - 1)
        tok = torch.where(alive.unsqueeze(1), tok, torch.full_like(tok, EOS))
        mask.append(alive)
        alive = alive & (tok.squeeze(1) != EOS)
        ids = torch.cat([ids, tok], 1)
    return ids, torch.stack(mask, 1)
