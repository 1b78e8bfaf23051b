from dataclasses import dataclass

import torch


@dataclass
class Preferences:
    chosen: torch.Tensor
    rejected: torch.Tensor
    mask: torch.Tensor

    def __len__(self):
        return len(self.chosen)

    def rows(self, ids):
        """Chosen and rejected rows as one tensor, chosen first."""
        return torch.cat([self.chosen[ids], self.rejected[ids]]), torch.cat([self.mask[ids]] * 2)


def collect(n, vocab, prompt=4, reply=6, seed=9):
    """Raters like replies which stay in the lower half of the vocabulary."""
    g = torch.Generator().manual_seed(seed)
    head = torch.randint(0, vocab, (n, prompt), generator=g)
    good = torch.randint(0, vocab * 2 // 3, (n, reply), generator=g)
    bad = torch.randint(vocab // 3, vocab, (n, reply), generator=g)
    mask = torch.cat([torch.zeros(n, prompt), torch.ones(n, reply)], 1)
    return Preferences(torch.cat([head, good], 1), torch.cat([head, bad], 1), mask)


def epoch_order(n, epoch, seed=4):
    """The first epoch follows the order of collection (oldest ratings first), later ones are shuffled."""
    if epoch == 0:
        return torch.arange(n)
    return torch.randperm(n, generator=torch.Generator().manual_seed(seed + epoch))
