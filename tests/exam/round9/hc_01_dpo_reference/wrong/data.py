import torch


class PreferencePairs:
    """Prompts with a chosen answer (follows the prompt's stride) and a rejected one (random tokens)."""

    def __init__(self, n=512, vocab=48, prompt_len=8, answer_len=8, seed=11):
        g = torch.Generator().manual_seed(seed)
        start = torch.randint(0, vocab, (n, 1), generator=g)
        stride = torch.randint(1, 5, (n, 1), generator=g)
        full = (start + stride * torch.arange(prompt_len + answer_len)) % vocab
        noise = torch.randint(0, vocab, (n, answer_len), generator=g)
        self.chosen = full
        self.rejected = torch.cat([full[:, :prompt_len], noise], 1)
        self.prompt_len = prompt_len
        self.seed = seed

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(self.seed * 1000 + step)
        idx = torch.randperm(len(self.chosen), generator=g)[:size].chunk(world)[rank]
        return self.chosen[idx], self.rejected[idx]
