import torch

PAD, SEP = 0, 1


class InstructionSet:
    """A prompt of random words, a separator, and as reply the prompt word by word in a fixed code."""

    def __init__(self, vocab, size, max_prompt, seed):
        g = torch.Generator().manual_seed(seed)
        code = torch.randperm(vocab - 2, generator=g) + 2
        self.rows, self.masks = [], []
        width = 2 * max_prompt + 1
        for _ in range(size):
            n = int(torch.randint(2, max_prompt + 1, (1,), generator=g))
            prompt = torch.randint(2, vocab, (n,), generator=g)
            row = torch.full((width,), PAD)
            row[: 2 * n + 1] = torch.cat([prompt, torch.tensor([SEP]), code[prompt - 2]])
            mask = torch.zeros(width)
            mask[n + 1 : 2 * n + 1] = 1.0
            self.rows.append(row)
            self.masks.append(mask)
        self.rows, self.masks = torch.stack(self.rows), torch.stack(self.masks)
        self.width = width

    def batch(self, step, size, rank, world):
        g = torch.Generator().manual_seed(1000 + step)
        pick = torch.randperm(len(self.rows), generator=g)[:size][rank::world]
        return self.rows[pick], self.masks[pick]
