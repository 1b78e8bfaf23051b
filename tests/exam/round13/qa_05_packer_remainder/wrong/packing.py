"""Documents of any length, packed into rows of one length without padding."""
import torch

EOS = 0


class Documents:
    def __init__(self, vocab, seed):
        self.vocab, self.seed = vocab, seed
        g = torch.Generator().manual_seed(seed)
        self.table = torch.stack([torch.randperm(vocab - 1, generator=g) + 1 for _ in range(3)])

    def __getitem__(self, i):
        """Document i: one of three languages, each with a walk of its own through the vocabulary."""
        g = torch.Generator().manual_seed(self.seed * 7919 + i)
        n = int(torch.randint(5, 40, (1,), generator=g))
        walk = self.table[int(torch.randint(0, 3, (1,), generator=g))]
        tokens = [int(torch.randint(1, self.vocab, (1,), generator=g))]
        while len(tokens) < n:
            tokens.append(int(walk[tokens[-1] - 1]))
        return tokens + [EOS]


class Packer:
    def __init__(self, docs, length):
        self.docs, self.length = docs, length
        self.next_doc = 0
        self.carry = []

    def row(self):
        need = self.length + 1
        while len(self.carry) < need:
            self.carry.extend(self.docs[self.next_doc])
            self.next_doc += 1
        row, self.carry = self.carry[:need], self.carry[self.length :]
        return row

    def batch(self, rows):
        return torch.tensor([self.row() for _ in range(rows)])

    def state_dict(self):
        return {"next_doc": self.next_doc, "carry": list(self.carry)}

    def load_state_dict(self, state):
        self.next_doc = state["next_doc"]
