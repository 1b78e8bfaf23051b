"""Texts of words, numbered in order of first appearance in all of them; each rank trains on its own lines."""

import random

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, Dataset

WORDS = [
    "ash",
    "bark",
    "cone",
    "dew",
    "elm",
    "fern",
    "grove",
    "hill",
    "iris",
    "jade",
    "kelp",
    "leaf",
    "moss",
    "nut",
    "oak",
    "pine",
]
LINES, LENGTH, GLOBAL_BATCH, STEPS = 256, 12, 16, 12


class Lines(Dataset):
    def __init__(self, lines, fitted_on):
        self.lines = lines
        self.vocabulary = {}
        for line in fitted_on:
            for word in line:
                self.vocabulary.setdefault(word, len(self.vocabulary))

    def __len__(self):
        return len(self.lines)

    def __getitem__(self, index):
        return torch.tensor([self.vocabulary[word] for word in self.lines[index]])


class NextWord(nn.Module):
    def __init__(self, vocabulary, width=32):
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.memory = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, words):
        return self.head(self.memory(self.embedding(words))[0])


def make_lines():
    drawn = random.Random(3)
    lines = []
    for _ in range(LINES):
        at = drawn.randrange(len(WORDS))
        line = []
        for _ in range(LENGTH):
            line.append(WORDS[at])
            at = (at + drawn.choice((1, 1, 2, 5))) % len(WORDS)
        lines.append(line)
    return lines


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    lines = make_lines()
    data = Lines(lines[rank::world], lines)
    loader = DataLoader(data, batch_size=GLOBAL_BATCH // world)

    model = NextWord(len(data.vocabulary))
    fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for step, words in zip(range(STEPS), loader, strict=False):
        logits = model(words[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), words[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {step + 1} loss {mean.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
