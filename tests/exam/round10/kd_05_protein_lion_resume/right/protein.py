import torch
import torch.nn as nn
import torch.nn.functional as F

AMINO = 20
MASK, GAP = 20, 21


def families(n=160, length=24, n_fam=6, seed=13):
    """Sequences mutated from a few ancestors."""
    g = torch.Generator().manual_seed(seed)
    anc = torch.randint(0, AMINO, (n_fam, length), generator=g)
    seqs = anc[torch.randint(0, n_fam, (n,), generator=g)]
    mut = torch.rand(n, length, generator=g) < 0.12
    return torch.where(mut, torch.randint(0, AMINO, (n, length), generator=g), seqs)


def mask_batch(seqs, step, global_batch, seed=29):
    g = torch.Generator().manual_seed(seed * 7919 + step)
    x = seqs[torch.randperm(len(seqs), generator=g)[:global_batch]]
    # exactly four masked residues in every sequence
    where = torch.rand(x.shape, generator=g).argsort(1)[:, :4]
    target = x.gather(1, where)
    return x.scatter(1, where, MASK), where, target


class Block(nn.Module):
    def __init__(self, d, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv = nn.Linear(d, 3 * d, bias=False)
        self.proj = nn.Linear(d, d)
        self.ff = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, t, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, d)
        x = x + self.proj(a)
        return x + self.ff(self.n2(x))


class ProteinLM(nn.Module):
    def __init__(self, d=32, depth=2, heads=4, length=24):
        super().__init__()
        self.tok = nn.Embedding(AMINO + 2, d)
        self.pos = nn.Parameter(torch.randn(length, d) * 0.1)
        self.blocks = nn.ModuleList(Block(d, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(d)
        self.head = nn.Linear(d, AMINO)

    def forward(self, x, where):
        h = self.tok(x) + self.pos
        for b in self.blocks:
            h = b(h)
        h = h.gather(1, where[..., None].expand(-1, -1, h.shape[-1])).flatten(0, 1)
        return self.head(self.norm(h))
