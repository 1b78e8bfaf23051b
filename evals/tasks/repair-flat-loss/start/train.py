"""Multi-label classification of short texts: torchrun --nproc-per-node 2 train.py steps=100"""

import sys
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, LENGTH, LABELS = 48, 10, 7


class Classifier(nn.Module):
    def __init__(self, width=40, layers=2):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(width, 4, 2 * width, dropout=0.0, batch_first=True) for _ in range(layers)
        )
        self.labels = nn.Linear(width, LABELS)

    def forward(self, words):
        x = self.embed(words)
        for layer in self.layers:
            x = layer(x)
        return self.labels(x.mean(dim=1))


class Experiment:
    def __init__(self, options):
        self.options = options
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(options.seed)
        self.model = Classifier()
        self.make_optimizer()
        self.parallelize()
        gen = torch.Generator().manual_seed(77)
        self.words = torch.randint(0, VOCAB, (320, LENGTH), generator=gen)
        self.targets = torch.stack(
            [(self.words % LABELS == label).any(dim=1).float() for label in range(LABELS)], dim=1
        )

    def make_optimizer(self):
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=self.options.lr, weight_decay=0.01)
        self.schedule = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lambda step: min(1.0, (step + 1) / 4))

    def parallelize(self):
        mesh = init_device_mesh("cpu", (self.world,))
        for layer in self.model.layers:
            fully_shard(layer, mesh=mesh)
        fully_shard(self.model, mesh=mesh)

    def batch(self, step):
        size = self.options.batch // self.world
        first = step * self.options.batch % len(self.words) + self.rank * size
        return self.words[first : first + size], self.targets[first : first + size]

    def run(self):
        for step in range(self.options.steps):
            words, targets = self.batch(step)
            loss = F.binary_cross_entropy_with_logits(self.model(words), targets)
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            self.schedule.step()
            if self.rank == 0:
                print(f"{step + 1}: {loss.item():.4f}", flush=True)


if __name__ == "__main__":
    options = SimpleNamespace(steps=40, batch=16, lr=4e-3, seed=1)
    for word in sys.argv[1:]:
        key, _, value = word.partition("=")
        setattr(options, key, type(getattr(options, key))(value))
    dist.init_process_group("gloo")
    Experiment(options).run()
    dist.destroy_process_group()
