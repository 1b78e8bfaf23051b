"""Sampling of completions and their rewards."""
import torch


def gumbel(shape, seed):
    u = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    return -torch.log(-torch.log(u.clamp(1e-6, 1 - 1e-6)))


class Sampler:
    """Each prompt gets `group` completions; every rank draws its share of them for all prompts."""

    def __init__(self, group, length, vocab, rank, world):
        assert group % world == 0
        self.group, self.length, self.vocab = group, length, vocab
        share = group // world
        self.members = range(rank * share, (rank + 1) * share)

    @torch.no_grad()
    def sample(self, model, prompts, step):
        n, width = prompts.shape
        noise = torch.cat([gumbel((n, self.length, self.vocab), 1_000_003 * step + m) for m in self.members])
        ids = prompts.repeat(len(self.members), 1)
        for t in range(self.length):
            logits = model(ids)[:, -1]
            ids = torch.cat([ids, (logits + noise[:, t]).argmax(-1, keepdim=True)], 1)
        return ids[:, width:]


def reward(prompts, completions):
    """Share of the symbols that repeat the prompt in reversed order."""
    target = prompts.flip(1).repeat(completions.shape[0] // prompts.shape[0], 1)
    return (completions == target).float().mean(1)
