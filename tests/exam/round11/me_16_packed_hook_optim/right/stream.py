"""An endless stream of documents packed into rows, with a position that can be saved."""
import torch

EOS = 0


class PackedStream:
    """Every rank runs the same stream and takes its rows of each global batch, so the
    position is the same everywhere. Documents end with EOS; a prompt part carries no loss."""

    def __init__(self, rows, length, rank, world, seed, vocab=32):
        self.rows, self.length, self.rank, self.world, self.vocab = rows, length, rank, world, vocab
        self.gen = torch.Generator().manual_seed(seed)
        self.tokens = torch.empty(0, dtype=torch.long)
        self.mask = torch.empty(0, dtype=torch.bool)

    def document(self):
        n = int(torch.randint(5, 30, (1,), generator=self.gen))
        step = int(torch.randint(1, 5, (1,), generator=self.gen))
        start = int(torch.randint(1, self.vocab, (1,), generator=self.gen))
        ids = (start - 1 + step * torch.arange(n)) % (self.vocab - 1) + 1
        prompt = int(torch.randint(1, n, (1,), generator=self.gen))
        mask = torch.arange(n + 1) >= prompt
        return torch.cat([ids, torch.tensor([EOS])]), mask

    def __iter__(self):
        return self

    def __next__(self):
        need = self.rows * self.length + 1
        while len(self.tokens) < need:
            ids, mask = self.document()
            self.tokens, self.mask = torch.cat([self.tokens, ids]), torch.cat([self.mask, mask])
        x = self.tokens[: need - 1].view(self.rows, self.length)
        y = self.tokens[1:need].view(self.rows, self.length)
        m = self.mask[1:need].view(self.rows, self.length)
        self.tokens, self.mask = self.tokens[need - 1 :].clone(), self.mask[need - 1 :].clone()
        mine = slice(self.rank * self.rows // self.world, (self.rank + 1) * self.rows // self.world)
        return x[mine], y[mine], m[mine], m.sum()

    def state_dict(self):
        return {"gen": self.gen.get_state(), "tokens": self.tokens, "mask": self.mask}

    def load_state_dict(self, state):
        self.gen.set_state(state["gen"])
        self.tokens, self.mask = state["tokens"], state["mask"]
