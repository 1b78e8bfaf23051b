"""Synthetic text: each token is 5 times the one before plus 3, plus a random bit, modulo the vocabulary."""

import torch

VOCAB, LENGTH, IGNORED = 64, 16, -100


def sequences(samples, seed=0):
    """Inputs and targets, each of [samples, LENGTH]."""
    gen = torch.Generator().manual_seed(seed)
    text = [torch.randint(0, VOCAB, (samples,), generator=gen)]
    for _ in range(LENGTH):
        text.append((5 * text[-1] + 3 + torch.randint(0, 2, (samples,), generator=gen)) % VOCAB)
    text = torch.stack(text, dim=1)
    return text[:, :-1], text[:, 1:].clone()


def dialogues(samples, seed=0):
    """As sequences, but only an answer at the end of each sample is a target; answers differ much in length."""
    inputs, targets = sequences(samples, seed)
    gen = torch.Generator().manual_seed(seed + 1)
    answer = 1 + (torch.rand(samples, generator=gen) ** 3 * (LENGTH - 1)).long()
    targets[torch.arange(LENGTH) < LENGTH - answer[:, None]] = IGNORED
    return inputs, targets


def batch_of(step, size, samples):
    """The indices of the samples of an optimizer step, in an order that is shuffled anew in each epoch."""
    epoch, at = divmod(step, samples // size)
    order = torch.randperm(samples, generator=torch.Generator().manual_seed(epoch))
    return order[at * size : (at + 1) * size]
