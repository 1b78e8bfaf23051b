import torch
import torch.nn as nn
import torch.nn.functional as F

from gather import gather_rows


class ImageEncoder(nn.Module):
    def __init__(self, ch=12, dim=16):
        super().__init__()
        self.c1 = nn.Conv2d(1, ch, 3, 2, 1)
        self.c2 = nn.Conv2d(ch, 2 * ch, 3, 2, 1)
        self.head = nn.Sequential(nn.Linear(2 * ch, 2 * ch), nn.ReLU(), nn.Linear(2 * ch, dim))

    def forward(self, x):
        h = F.relu(self.c2(F.relu(self.c1(x)))).mean((2, 3))
        return F.normalize(self.head(h), dim=-1)


class KeyQueue:
    """FIFO of keys of former steps; the same on all ranks."""

    def __init__(self, size, dim, seed):
        self.keys = F.normalize(torch.randn(size, dim, generator=torch.Generator().manual_seed(seed)), dim=-1)
        self.head = 0

    def push(self, keys):
        idx = (self.head + torch.arange(len(keys))) % len(self.keys)
        self.keys[idx] = keys
        self.head = (self.head + len(keys)) % len(self.keys)

    def state_dict(self):
        return {"keys": self.keys, "head": self.head}

    def load_state_dict(self, sd):
        self.keys, self.head = sd["keys"], sd["head"]


def contrastive_loss(q, k, queue, tau, world):
    """InfoNCE of all queries of the global batch against all keys and the queue, plus a uniformity term between
    the queries. The loss is computed in full on every rank."""
    all_q, all_k = gather_rows(q), gather_rows(k)
    logits = torch.cat([all_q @ all_k.T, all_q @ queue.keys.clone().T], 1) / tau
    nce = F.cross_entropy(logits, torch.arange(len(all_q)))
    sim = all_q @ all_q.T
    off = ~torch.eye(len(all_q), dtype=torch.bool)
    uniform = torch.logsumexp(2 * sim[off], 0)
    # gather_rows sums the gradients of `world` equal losses and FSDP averages over the ranks: own rows get
    # world * gradient, the average of the ranks' parts divides it by world again
    return nce + 0.05 * uniform, all_k.detach()


@torch.no_grad()
def momentum_update(target, online, m):
    for t, o in zip(target.parameters(), online.parameters()):
        t.lerp_(o, 1 - m)
