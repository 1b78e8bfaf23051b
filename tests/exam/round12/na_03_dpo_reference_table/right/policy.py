import torch
import torch.nn as nn
import torch.nn.functional as F


class DecoderLayer(nn.Module):
    def __init__(self, d, h):
        super().__init__()
        self.h = h
        self.ln_a, self.ln_f = nn.LayerNorm(d), nn.LayerNorm(d)
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d)
        self.f1, self.f2 = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)

    def forward(self, x):
        b, t, d = x.shape
        n = self.ln_a(x)
        k, v = self.kv(n).chunk(2, -1)
        split = lambda z: z.view(b, t, self.h, d // self.h).transpose(1, 2)
        y = F.scaled_dot_product_attention(split(self.q(n)), split(k), split(v), is_causal=True)
        x = x + self.o(y.transpose(1, 2).reshape(b, t, d))
        return x + self.f2(F.gelu(self.f1(self.ln_f(x))))


class Policy(nn.Module):
    def __init__(self, vocab, max_len, d=32, h=2, layers=2):
        super().__init__()
        self.tok, self.pos = nn.Embedding(vocab, d), nn.Embedding(max_len, d)
        self.layers = nn.ModuleList(DecoderLayer(d, h) for _ in range(layers))
        self.ln = nn.LayerNorm(d)
        self.lm_head = nn.Linear(d, vocab, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos.weight[: ids.shape[1]]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.ln(x))


def answer_logp(model, ids, mask):
    """Sum of the log-probabilities of the answer tokens (mask is 1 on them)."""
    logp = model(ids[:, :-1]).log_softmax(-1)
    tok = logp.gather(-1, ids[:, 1:, None]).squeeze(-1)
    return (tok * mask[:, 1:]).sum(-1)
