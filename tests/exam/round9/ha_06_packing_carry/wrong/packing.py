import torch

EOS = 1


def document(index, vocab, seed):
    g = torch.Generator().manual_seed(seed * 65_537 + index)
    n = int(torch.randint(5, 40, (1,), generator=g))
    a = int(torch.randint(1, 5, (1,), generator=g))
    x = int(torch.randint(2, vocab, (1,), generator=g))
    tokens = []
    for _ in range(n):
        tokens.append(x)
        x = 2 + (x * a + 3 + int(torch.rand(1, generator=g) < 0.1)) % (vocab - 2)
    return tokens + [EOS]


class PackedStream:
    """An endless stream of documents, packed into rows of a fixed length without padding.
    All ranks read the same stream and keep their rows of each global batch."""

    def __init__(self, vocab, row_len, global_batch, rank, world, seed=0):
        self.vocab, self.row_len, self.global_batch = vocab, row_len, global_batch
        self.rank, self.world, self.seed = rank, world, seed
        self.next_doc = 0
        self.carry = []

    def __iter__(self):
        return self

    def __next__(self):
        need = self.global_batch * self.row_len
        while len(self.carry) < need + 1:
            self.carry.extend(document(self.next_doc, self.vocab, self.seed))
            self.next_doc += 1
        tokens = torch.tensor(self.carry[:need + 1])
        self.carry = self.carry[need:]
        x, y = tokens[:-1].view(-1, self.row_len), tokens[1:].view(-1, self.row_len)
        return x[self.rank::self.world], y[self.rank::self.world]

    def state_dict(self):
        return {"next_doc": self.next_doc}

    def load_state_dict(self, state):
        self.next_doc = state["next_doc"]
