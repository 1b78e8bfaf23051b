import torch
import torch.nn as nn
import torch.nn.functional as F

VOCAB, WIDTH, MAXLEN = 16, 24, 12


class Mixer(nn.Module):
    """Causal running mean followed by an MLP: a very small stand-in for attention."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.mix = nn.Linear(2 * width, width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        h = self.norm(x)
        n = torch.arange(1, h.size(1) + 1, device=h.device).view(1, -1, 1)
        past = h.cumsum(1) / n
        x = x + self.mix(torch.cat([h, past], dim=-1))
        return x + self.down(F.gelu(self.up(x)))


class CausalLM(nn.Module):
    def __init__(self, vocab=VOCAB, width=WIDTH, depth=2):
        super().__init__()
        self.tok = nn.Embedding(vocab, width)
        self.pos = nn.Embedding(MAXLEN, width)
        self.layers = nn.ModuleList(Mixer(width) for _ in range(depth))
        self.head = nn.Linear(width, vocab)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def sft_base(seed, data):
    """The supervised starting point; every rank computes the same one."""
    torch.manual_seed(seed)
    lm = CausalLM()
    opt = torch.optim.AdamW(lm.parameters(), lr=1e-2)
    for _ in range(15):
        logits = lm(data[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), data[:, 1:].flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
    return lm.state_dict()
