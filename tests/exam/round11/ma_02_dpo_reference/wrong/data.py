import torch

PROMPT, RESPONSE, VOCAB = 4, 8, 40


class PreferencePairs:
    """Chosen answers count upwards from the last prompt token, rejected ones are noise."""

    def __init__(self, n=192, seed=3):
        g = torch.Generator().manual_seed(seed)
        self.prompt = torch.randint(0, VOCAB, (n, PROMPT), generator=g)
        up = (self.prompt[:, -1:] + 1 + torch.arange(RESPONSE)) % VOCAB
        noise = torch.randint(0, VOCAB, (n, RESPONSE), generator=g)
        flip = torch.rand(n, RESPONSE, generator=g) < 0.15
        self.chosen = torch.where(flip, noise, up)
        self.rejected = torch.randint(0, VOCAB, (n, RESPONSE), generator=g)

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(500 + step)
        idx = torch.randperm(len(self.prompt), generator=g)[:size][rank::world]
        p = self.prompt[idx]
        return torch.cat([p, self.chosen[idx]], 1), torch.cat([p, self.rejected[idx]], 1)
