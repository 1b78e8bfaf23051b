"""Synthetic instruction data: a prompt of random symbols and a response that transforms it."""
import torch

PAD, BOS, SEP, EOS = 0, 1, 2, 3
FIRST = 4
IGNORE = -100


def make_example(gen, vocab, max_prompt):
    n = int(torch.randint(2, max_prompt + 1, (1,), generator=gen))
    prompt = torch.randint(FIRST, vocab, (n,), generator=gen)
    # short tasks "answer the last symbol", long tasks "reverse the prompt"
    if int(torch.randint(0, 2, (1,), generator=gen)):
        response = prompt.flip(0)
    else:
        response = prompt[-1:]
    tokens = torch.cat([torch.tensor([BOS]), prompt, torch.tensor([SEP]), response, torch.tensor([EOS])])
    labels = tokens.clone()
    labels[: n + 2] = IGNORE
    return tokens, labels


class SFTDataset:
    def __init__(self, size, vocab, max_prompt, seed):
        gen = torch.Generator().manual_seed(seed)
        self.items = [make_example(gen, vocab, max_prompt) for _ in range(size)]

    def __len__(self):
        return len(self.items)

    def collate(self, indices):
        width = max(len(self.items[i][0]) for i in indices)
        tokens = torch.full((len(indices), width), PAD)
        labels = torch.full((len(indices), width), IGNORE)
        for row, i in enumerate(indices):
            t, l = self.items[i]
            tokens[row, : len(t)] = t
            labels[row, : len(l)] = l
        return tokens, labels


class GlobalBatches:
    """Yields, for every optimizer step, the micro-batches of this rank."""

    def __init__(self, dataset, global_batch, micro_batches, rank, world, seed):
        self.dataset, self.global_batch, self.micro = dataset, global_batch, micro_batches
        self.rank, self.world, self.seed = rank, world, seed
        self.per_epoch = len(dataset) // global_batch

    def step(self, step):
        epoch, pos = divmod(step, self.per_epoch)
        order = torch.randperm(len(self.dataset), generator=torch.Generator().manual_seed(self.seed + epoch))
        batch = order[pos * self.global_batch : (pos + 1) * self.global_batch].tolist()
        mine = batch[self.rank :: self.world]
        size = len(mine) // self.micro
        return [self.dataset.collate(mine[i * size : (i + 1) * size]) for i in range(self.micro)]
