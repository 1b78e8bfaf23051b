"""Synthetic preference pairs: the chosen completion follows the prompt's 'topic', the rejected one drifts away."""
import torch

VOCAB, PROMPT, LENGTH = 24, 4, 12


def make_pairs(n=384, seed=11):
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=g)
    topic = prompt.sum(1, keepdim=True) % 6
    good = topic * 4 + torch.randint(0, 4, (n, LENGTH - PROMPT), generator=g)
    bad = torch.randint(0, VOCAB, (n, LENGTH - PROMPT), generator=g)
    return torch.cat([prompt, good], 1), torch.cat([prompt, bad], 1)


class PairStream:
    """Global batch number `step` is the same for every world size; each rank reads its slice of it."""

    def __init__(self, global_batch, rank, world, seed=5):
        self.chosen, self.rejected = make_pairs()
        self.local, self.global_batch, self.rank, self.seed = global_batch // world, global_batch, rank, seed

    def batch(self, step):
        per_epoch = len(self.chosen) // self.global_batch
        epoch, i = divmod(step, per_epoch)
        order = torch.randperm(len(self.chosen), generator=torch.Generator().manual_seed(self.seed + epoch))
        lo = i * self.global_batch + self.rank * self.local
        idx = order[lo:lo + self.local]
        return self.chosen[idx], self.rejected[idx]
