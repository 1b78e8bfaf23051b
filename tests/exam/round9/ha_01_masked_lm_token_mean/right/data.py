"""Synthetic instruction data: a prompt that is not trained on, then an answer of variable length."""
import torch

VOCAB = 48
PAD = 0
IGNORE = -100
MAX_LEN = 24


def make_example(index):
    g = torch.Generator().manual_seed(7919 * index + 13)
    prompt_len = int(torch.randint(3, 8, (1,), generator=g))
    # long tail: few long answers, many short ones
    answer_len = 2 + int(14 * torch.rand(1, generator=g).item() ** 2)
    start = int(torch.randint(1, VOCAB, (1,), generator=g))
    stride = 1 + answer_len % 5
    prompt = torch.randint(1, VOCAB, (prompt_len,), generator=g)
    answer = (start + stride * torch.arange(answer_len)) % (VOCAB - 1) + 1
    prompt[-1] = start
    return prompt, answer


def collate(indices):
    ids = torch.full((len(indices), MAX_LEN), PAD)
    labels = torch.full((len(indices), MAX_LEN), IGNORE)
    for row, index in enumerate(indices):
        prompt, answer = make_example(index)
        n, m = len(prompt), len(answer)
        ids[row, :n] = prompt
        ids[row, n:n + m] = answer
        # position t predicts token t + 1
        labels[row, n - 1:n + m - 1] = answer
    return ids, labels


class GlobalBatches:
    """Every rank walks the same permutation and takes its own rows of each global batch."""

    def __init__(self, size, global_batch, rank, world, seed):
        self.size, self.global_batch = size, global_batch
        self.rank, self.world, self.seed = rank, world, seed

    def step_batches(self, step, accum):
        per_epoch = self.size // self.global_batch
        epoch, slot = divmod(step, per_epoch)
        g = torch.Generator().manual_seed(self.seed + epoch)
        order = torch.randperm(self.size, generator=g).tolist()
        chosen = order[slot * self.global_batch:(slot + 1) * self.global_batch]
        per_rank = self.global_batch // self.world
        mine = chosen[self.rank * per_rank:(self.rank + 1) * per_rank]
        micro = per_rank // accum
        return [collate(mine[i * micro:(i + 1) * micro]) for i in range(accum)]
