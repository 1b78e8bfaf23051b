"""Samples are addressed by one running number; who computes a sample does not matter."""

import torch


def sample(number):
    g = torch.Generator().manual_seed(number)
    length = int(torch.randint(4, 13, (1,), generator=g))
    digits = torch.randint(1, 8, (length,), generator=g)
    return digits, int(torch.bincount(digits, minlength=8).argmax()) % 5


def collate(numbers):
    rows = [sample(n) for n in numbers]
    width = max(len(d) for d, _ in rows)
    tokens = torch.zeros(len(rows), width, dtype=torch.long)
    for i, (d, _) in enumerate(rows):
        tokens[i, : len(d)] = d
    return tokens, torch.tensor([y for _, y in rows])
