"""A toy instruction task: the prompt is a vector, the right answer three tokens that depend on it."""

import torch

TOKENS, LENGTH, DIM = 6, 3, 8


class Task:
    def __init__(self, seed=21):
        g = torch.Generator().manual_seed(seed)
        self.key = torch.randn(LENGTH, DIM, TOKENS, generator=g)
        self.hardness = torch.randn(DIM, generator=g)
        self.seed = seed

    def prompts(self, n, round_):
        g = torch.Generator().manual_seed(self.seed * 7919 + round_)
        return torch.randn(n, DIM, generator=g)

    def reward(self, prompt, answer):
        best = torch.einsum("nd,lda->nla", prompt, self.key).argmax(-1)
        hits = (answer == best).float().mean(-1)
        # some prompts are worth more than others, as with real reward models
        return hits + 2.0 * torch.tanh(prompt @ self.hardness)
