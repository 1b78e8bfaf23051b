"""Synthetic instruction data: a prompt, a separator and an answer.

Short answers copy the last prompt token, long answers reverse the whole prompt.
"""
import torch

PAD, SEP, EOS = 0, 1, 2
IGNORE = -100
VOCAB = 40


class InstructionSet:
    def __init__(self, size=256, seed=11):
        g = torch.Generator().manual_seed(seed)
        self.items = []
        for _ in range(size):
            n = int(torch.randint(3, 16, (1,), generator=g))
            prompt = torch.randint(4, VOCAB, (n,), generator=g).tolist()
            if torch.rand(1, generator=g).item() < 0.5:
                answer = prompt[-1:]
            else:
                answer = prompt[::-1]
            self.items.append((prompt + [SEP], answer + [EOS]))

    def __len__(self):
        return len(self.items)


def collate(items):
    width = max(len(p) + len(a) for p, a in items)
    ids = torch.full((len(items), width), PAD)
    labels = torch.full((len(items), width), IGNORE)
    for i, (prompt, answer) in enumerate(items):
        seq = prompt + answer
        ids[i, : len(seq)] = torch.tensor(seq)
        labels[i, len(prompt) : len(seq)] = torch.tensor(answer)
    return ids, labels


class Batches:
    """Global batches in a seeded order; every rank takes its share of each micro-batch."""

    def __init__(self, dataset, global_batch, micro_batches, rank, world, seed=5):
        assert global_batch % (micro_batches * world) == 0
        self.ds, self.gb, self.mb, self.rank, self.world, self.seed = dataset, global_batch, micro_batches, rank, world, seed
        self.per_epoch = len(dataset) // global_batch

    def at(self, step):
        epoch, k = divmod(step, self.per_epoch)
        order = torch.randperm(len(self.ds), generator=torch.Generator().manual_seed(self.seed + epoch)).tolist()
        chosen = order[k * self.gb : (k + 1) * self.gb]
        size = self.gb // self.mb
        for m in range(self.mb):
            part = chosen[m * size : (m + 1) * size]
            yield collate([self.ds.items[i] for i in part[self.rank :: self.world]])
