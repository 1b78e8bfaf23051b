import torch
import torch.nn as nn
import torch.nn.functional as F


class Attend(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.q, self.kv, self.o = nn.Linear(d, d), nn.Linear(d, 2 * d, bias=False), nn.Linear(d, d)

    def forward(self, x, mem, causal=False):
        k, v = self.kv(mem).chunk(2, -1)
        return self.o(F.scaled_dot_product_attention(self.q(x), k, v, is_causal=causal))


class EncoderLayer(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.att = Attend(d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.ReLU(), nn.Linear(2 * d, d))

    def forward(self, x):
        n = self.n1(x)
        x = x + self.att(n, n)
        return x + self.ff(self.n2(x))


class DecoderLayer(EncoderLayer):
    def __init__(self, d):
        super().__init__(d)
        self.n3, self.cross = nn.LayerNorm(d), Attend(d)

    def forward(self, x, mem):
        n = self.n1(x)
        x = x + self.att(n, n, causal=True)
        x = x + self.cross(self.n3(x), mem)
        return x + self.ff(self.n2(x))


class Seq2Seq(nn.Module):
    def __init__(self, src_vocab, tgt_vocab, length, d=32):
        super().__init__()
        self.src, self.tgt = nn.Embedding(src_vocab, d), nn.Embedding(tgt_vocab + 1, d)
        self.pos = nn.Parameter(torch.randn(length, d) * 0.3)
        self.enc, self.dec = EncoderLayer(d), DecoderLayer(d)
        self.out = nn.Linear(d, tgt_vocab, bias=False)
        self.bos = tgt_vocab

    def forward(self, src, tgt):
        mem = self.enc(self.src(src) + self.pos)
        shifted = torch.cat([torch.full_like(tgt[:, :1], self.bos), tgt[:, :-1]], 1)
        return self.out(self.dec(self.tgt(shifted) + self.pos, mem))
