import torch

from model import LENGTH, VOCAB

PROMPT = 5


def sequences(n, seed, stride):
    """Prompt of five tokens; the answer goes on from its last one in steps of `stride` (one per row)."""
    g = torch.Generator().manual_seed(seed)
    prompt = torch.randint(0, VOCAB - 1, (n, PROMPT), generator=g)
    answer = (prompt[:, -1:] + stride[:, None] * torch.arange(1, LENGTH - PROMPT + 1)) % (VOCAB - 1) + 1
    length = torch.randint(3, LENGTH - PROMPT + 1, (n,), generator=g)
    mask = torch.arange(LENGTH - PROMPT) < length[:, None]
    return torch.cat([prompt, answer], 1), torch.cat([torch.zeros(n, PROMPT, dtype=torch.bool), mask], 1)


def sft_data(n=256):
    stride = torch.randint(1, 4, (n,), generator=torch.Generator().manual_seed(1))
    return sequences(n, 2, stride)


def preference_pairs(n=256):
    """Chosen: stride 2; rejected: stride 1 or 3. Same prompts, lengths of their own."""
    other = torch.where(torch.rand(n, generator=torch.Generator().manual_seed(3)) < 0.5, 1, 3)
    chosen, chosen_mask = sequences(n, 4, torch.full((n,), 2))
    rejected, rejected_mask = sequences(n, 4, other)
    return chosen, chosen_mask, rejected, rejected_mask
