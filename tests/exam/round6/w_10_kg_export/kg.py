import torch
import torch.nn as nn


class DistMult(nn.Module):
    """Knowledge graph embeddings with a small network on top of the relation."""

    def __init__(self, n_entity=96, n_relation=8, dim=24):
        super().__init__()
        self.entity = nn.Embedding(n_entity, dim)
        self.relation = nn.Embedding(n_relation, dim)
        self.adapt = nn.Sequential(nn.Linear(dim, dim), nn.Tanh(), nn.Linear(dim, dim))
        nn.init.normal_(self.entity.weight, std=0.3)
        nn.init.normal_(self.relation.weight, std=0.3)

    def forward(self, head, rel):
        r = self.relation(rel)
        return (self.entity(head) * (r + self.adapt(r))) @ self.entity.weight.T


def triples(n=1200, n_entity=96, n_relation=8, seed=4):
    """Relation r links an entity to those in the group that r assigns to the entity's group."""
    g = torch.Generator().manual_seed(seed)
    group = torch.arange(n_entity) % 12
    to = torch.stack([torch.randperm(12, generator=g) for _ in range(n_relation)])
    head = torch.randint(n_entity, (n,), generator=g)
    rel = torch.randint(n_relation, (n,), generator=g)
    tail = to[rel, group[head]] + 12 * torch.randint(n_entity // 12, (n,), generator=g)
    return torch.stack([head, rel, tail], dim=1)


def mrr(model, t):
    scores = model(t[:, 0], t[:, 1])
    rank = (scores >= scores.gather(1, t[:, 2:])).sum(1)
    return (1.0 / rank).mean().item()
