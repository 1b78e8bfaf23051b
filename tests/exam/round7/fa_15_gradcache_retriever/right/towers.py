import torch
import torch.nn as nn
import torch.nn.functional as F


class Tower(nn.Module):
    """Bag of embeddings with attention pooling."""

    def __init__(self, vocab, dim, out):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.score = nn.Linear(dim, 1, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, out))

    def forward(self, ids):
        x = self.embed(ids)
        pooled = (self.score(x).softmax(1) * x).sum(1)
        return F.normalize(self.mlp(pooled), dim=-1)


class Retriever(nn.Module):
    def __init__(self, vocab=50, dim=24, out=16):
        super().__init__()
        self.query = Tower(vocab, dim, out)
        self.document = Tower(vocab, dim, out)

    def forward(self, queries, documents):
        return self.query(queries), self.document(documents)
