"""Sequence classification with torch's own transformer layers, biases included."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, WIDTH, CLASSES = 24, 12, 32, 4
GLOBAL_BATCH, SAMPLES, STEPS = 32, 1024, 20


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(WIDTH, nhead=4, dim_feedforward=64, dropout=0.0, batch_first=True)
            for _ in range(2)
        )
        self.out = nn.Linear(WIDTH, CLASSES)

    def forward(self, tokens):
        x = self.embed(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.out(x.mean(dim=1))


def make_dataset():
    """The class is given by which quarter of the vocabulary is drawn most often."""
    gen = torch.Generator().manual_seed(0)
    labels = torch.randint(0, CLASSES, (SAMPLES,), generator=gen)
    quarter = VOCAB // CLASSES
    own = labels[:, None] * quarter + torch.randint(0, quarter, (SAMPLES, SEQ), generator=gen)
    other = torch.randint(0, VOCAB, (SAMPLES, SEQ), generator=gen)
    tokens = torch.where(torch.rand(SAMPLES, SEQ, generator=gen) < 0.5, own, other)
    return tokens, labels


def main():
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = Classifier()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)

    tokens, labels = make_dataset()
    for step in range(STEPS):
        first = step * GLOBAL_BATCH % SAMPLES
        index = torch.arange(first, first + GLOBAL_BATCH)[rank::world]
        loss = F.cross_entropy(model(tokens[index]), labels[index], label_smoothing=0.05)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if rank == 0:
            print(f"step {step + 1} loss {loss.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
