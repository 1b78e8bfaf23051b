import torch

PAD, IGNORE, VOCAB = 0, -100, 24


def sentence(g):
    """Counting up by a step that the first two tokens fix; very uneven lengths."""
    length = int(torch.randint(4, 29, (1,), generator=g))
    start, step = (int(v) for v in torch.randint(1, VOCAB, (2,), generator=g))
    return 1 + (start + step * torch.arange(length)) % (VOCAB - 1)


class Corpus:
    """A stream of documents; the state is the generator."""

    def __init__(self, seed):
        self.gen = torch.Generator().manual_seed(seed)

    def window(self, micro_batches, rows, rank, world):
        """rows is the number of documents of a micro-batch on all ranks; sorted by length, so ranks get very different numbers of tokens."""
        out = []
        for _ in range(micro_batches):
            docs = sorted((sentence(self.gen) for _ in range(rows)), key=len)
            docs = docs[rank * rows // world:(rank + 1) * rows // world]
            width = max(map(len, docs))
            ids = torch.full((len(docs), width), PAD)
            for row, doc in zip(ids, docs):
                row[:len(doc)] = doc
            target = ids[:, 1:].masked_fill(ids[:, 1:] == PAD, IGNORE)
            target[:, 0] = IGNORE  # the step cannot be known from one token
            out.append((ids[:, :-1], target))
        return out
