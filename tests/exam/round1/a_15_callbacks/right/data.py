import torch

VOCAB, LENGTH = 34, 20


def make(n, seed):
    """Rows 'a a+d a+2d ...' of different lengths, padded; targets of the padding are -100."""
    g = torch.Generator().manual_seed(seed)
    a, d = torch.randint(0, VOCAB, (n, 1), generator=g), torch.randint(1, 5, (n, 1), generator=g)
    rows = (a + d * torch.arange(LENGTH + 1)) % VOCAB
    length = torch.randint(5, LENGTH + 1, (n, 1), generator=g)
    x, y = rows[:, :-1], rows[:, 1:].clone()
    y[torch.arange(LENGTH) >= length] = -100
    return x, y


class Windows:
    """Stateful iterator over accumulation windows; a window is a list of (x, y) of this rank plus the global token count."""

    def __init__(self, data, micro, accum, rank, world, seed):
        self.x, self.y = data
        self.micro, self.accum, self.rank, self.world, self.seed = micro, accum, rank, world, seed
        self.epoch = self.at = 0
        self._shuffle()

    def _shuffle(self):
        g = torch.Generator().manual_seed(self.seed + 17 * self.epoch)
        self.order = torch.randperm(len(self.x), generator=g)

    def __next__(self):
        if self.at + self.micro > len(self.x):
            self.epoch, self.at = self.epoch + 1, 0
            self._shuffle()
        parts = []
        while len(parts) < self.accum and self.at + self.micro <= len(
            self.x
        ):  # the last window of an epoch may be short
            parts.append(self.order[self.at : self.at + self.micro])
            self.at += self.micro
        tokens = sum(int((self.y[i] != -100).sum()) for i in parts)
        mine = [i[self.rank :: self.world] for i in parts]
        return [(self.x[i], self.y[i]) for i in mine], tokens

    def state_dict(self):
        return {"epoch": self.epoch, "at": self.at}

    def load_state_dict(self, sd):
        self.epoch, self.at = sd["epoch"], sd["at"]
        self._shuffle()
