import torch


class Documents:
    """Documents of very different length over a small alphabet."""

    def __init__(self, n=300, vocab=20, longest=40, seed=23):
        g = torch.Generator().manual_seed(seed)
        self.vocab = vocab
        jump = torch.randint(1, vocab, (vocab,), generator=g)
        self.docs = []
        for _ in range(n):
            length = int(4 + (longest - 4) * torch.rand(1, generator=g).item() ** 3)
            x = [int(torch.randint(vocab, (1,), generator=g))]
            for _ in range(length):
                step = jump[x[-1]] if torch.rand(1, generator=g) < 0.8 else torch.randint(vocab, (1,), generator=g)
                x.append(int((x[-1] + step) % vocab))
            self.docs.append(torch.tensor(x))


class TokenBudgetSampler:
    """Takes documents in random order until the budget of tokens is spent. The number of documents of a
    batch varies; they are given to the ranks greedily by length, so that a rank may get few or none."""

    def __init__(self, lengths, budget, seed):
        self.lengths, self.budget = lengths, budget
        self.generator = torch.Generator().manual_seed(seed)
        self.queue = []

    def next_batch(self):
        batch, spent = [], 0
        while True:
            if not self.queue:
                self.queue = torch.randperm(len(self.lengths), generator=self.generator).tolist()
            cost = self.lengths[self.queue[0]]
            if batch and spent + cost > self.budget:
                return batch
            batch.append(self.queue.pop(0))
            spent += cost

    def split(self, batch, world):
        load, parts = [0] * world, [[] for _ in range(world)]
        for i in sorted(batch, key=lambda d: (-self.lengths[d], d)):
            r = load.index(min(load))
            parts[r].append(i)
            load[r] += self.lengths[i]
        return parts

    def state_dict(self):
        return {"queue": list(self.queue), "generator": self.generator.get_state()}

    def load_state_dict(self, state):
        self.queue = list(state["queue"])
        self.generator.set_state(state["generator"])
