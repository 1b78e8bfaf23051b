import torch
import torch.nn as nn


class SeededDropout(nn.Module):
    """Dropout whose mask depends on the example and the step only, so that the second pass over a chunk
    sees the masks of the first one, on whichever rank it runs."""

    def __init__(self, p):
        super().__init__()
        self.p = p

    def forward(self, x, seeds):
        if not self.training or self.p == 0:
            return x
        masks = [torch.rand(x.shape[1:], generator=torch.Generator().manual_seed(int(s))) for s in seeds]
        return x * (torch.stack(masks) >= self.p) / (1 - self.p)


class Encoder(nn.Module):
    def __init__(self, vocab, dim=32):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.fc = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))
        self.norm = nn.LayerNorm(dim)
        self.drop = SeededDropout(0.1)
        self.query_head = nn.Linear(dim, dim)
        self.doc_head = nn.Linear(dim, dim)

    def forward(self, ids, seeds, kind):
        x = self.drop(self.embed(ids), seeds).mean(1)
        x = self.norm(x + self.fc(x))
        return self.query_head(x) if kind == "query" else self.doc_head(x)
