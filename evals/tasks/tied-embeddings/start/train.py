"""python train.py [number of steps]"""

import sys

import torch
import torch.nn.functional as F
from mlm import MaskedLM

VOCAB, LENGTH, MASK, BATCH = 80, 14, 79, 24


def batch(step):
    """The words of one optimizer step, some of them masked; the same number in each sample."""
    gen = torch.Generator().manual_seed(1000 + step)
    words = (torch.randint(0, 79, (BATCH, 1), generator=gen) + 3 * torch.arange(LENGTH)) % 79
    hidden = torch.rand(BATCH, LENGTH, generator=gen).argsort(dim=1) < 3
    return words.masked_fill(hidden, MASK), words.masked_fill(~hidden, -100)


def parameter_groups(model):
    """Weight decay for matrices only."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    others = [p for p in model.parameters() if p.dim() <= 1]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def main(steps):
    torch.manual_seed(17)
    model = MaskedLM()
    optimizer = torch.optim.AdamW(parameter_groups(model), lr=3e-3)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, start_factor=0.25, total_iters=4)
    for step in range(steps):
        words, targets = batch(step)
        loss = F.cross_entropy(model(words).flatten(0, 1), targets.flatten())
        loss.backward()
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        print(step + 1, round(loss.item(), 4))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 60)
