import torch
import torch.nn as nn


def make_triples(entities=150, relations=6, n=1800, seed=2):
    """Every relation links entities of one hidden type with entities of another."""
    g = torch.Generator().manual_seed(seed)
    types = torch.randint(5, (entities,), generator=g)
    head_t = torch.randint(5, (relations,), generator=g)
    tail_t = torch.randint(5, (relations,), generator=g)
    rel = torch.randint(relations, (n,), generator=g)

    def pick(want):
        ok = (types[None, :] == want[:, None]).float() + 0.01
        return torch.multinomial(ok, 1, generator=g)[:, 0]

    return torch.stack([pick(head_t[rel]), rel, pick(tail_t[rel])], dim=1), entities, relations


class ComplEx(nn.Module):
    def __init__(self, entities, relations, dim=16, p=0.2):
        super().__init__()
        self.ent = nn.Embedding(entities, 2 * dim)
        self.rel = nn.Embedding(relations, 2 * dim)
        nn.init.normal_(self.ent.weight, std=0.4)
        nn.init.normal_(self.rel.weight, std=0.4)
        self.drop = nn.Dropout(p)

    def forward(self, h, r, t):
        """h, r: [b]; t: [b, k] candidate tails. Returns scores [b, k]."""
        hr, hi = self.drop(self.ent(h)).chunk(2, -1)
        rr, ri = self.rel(r).chunk(2, -1)
        q = torch.cat([hr * rr - hi * ri, hr * ri + hi * rr], dim=-1)
        return (q[:, None] * self.drop(self.ent(t))).sum(-1)
