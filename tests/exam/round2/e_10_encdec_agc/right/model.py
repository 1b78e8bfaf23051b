import torch, torch.nn as nn, torch.nn.functional as F


class Attend(nn.Module):
    def __init__(self, d, causal=False):
        super().__init__()
        self.q, self.kv, self.o, self.causal = nn.Linear(d, d), nn.Linear(d, 2 * d), nn.Linear(d, d), causal

    def forward(self, x, mem):
        k, v = self.kv(mem).chunk(2, -1)
        return x + self.o(F.scaled_dot_product_attention(self.q(x), k, v, is_causal=self.causal))


class Layer(nn.Module):
    def __init__(self, d, cross):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.own = Attend(d, causal=cross)
        self.cross = Attend(d) if cross else None
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x, mem=None):
        y = self.n1(x)
        x = x + self.own(y, y)
        if self.cross is not None:
            x = self.cross(x, mem)
        return x + self.ff(self.n2(x))


class Seq2Seq(nn.Module):
    def __init__(self, vocab=14, d=16, t=9):
        super().__init__()
        self.emb, self.pos = nn.Embedding(vocab, d), nn.Parameter(torch.randn(t, d) * 0.3)
        self.encoder = nn.ModuleList([Layer(d, False)])
        self.decoder = nn.ModuleList([Layer(d, True)])
        self.head = nn.Linear(d, vocab)

    def forward(self, src, tgt_in):
        m = self.emb(src) + self.pos[: src.shape[1]]
        for l in self.encoder:
            m = l(m)
        y = self.emb(tgt_in) + self.pos[: tgt_in.shape[1]]
        for l in self.decoder:
            y = l(y, m)
        return self.head(y)
