"""Attention-based multiple-instance learning on bags of tile embeddings.

A slide is a bag of tile feature vectors and has one of three grades. The encoder and
the gated-attention pooling are trained with a slide-level cross entropy; after every
epoch the validation slides are scored and a confusion matrix is reported.
"""
import math
import os
from dataclasses import dataclass, field
from enum import Enum
from typing import Optional

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler, Sampler, TensorDataset


class Stage(Enum):
    TRAIN = "train"
    VAL = "val"


@dataclass
class Config:
    tiles: int = 12
    feat: int = 24
    hidden: int = 32
    grades: int = 3
    train_slides: int = 96
    val_slides: int = 90
    batch_size: int = 16          # over all processes
    batch_size_val: int = 8       # per process
    epochs: int = 6
    lr: float = 3e-3
    seed: int = 42
    class_weights: list = field(default_factory=lambda: [1.0, 1.2, 1.5])


class ShardSampler(Sampler):
    """Process r of n visits samples r, r + n, r + 2n, ... in order, without padding."""

    def __init__(self, dataset):
        self.indices = range(dist.get_rank(), len(dataset), dist.get_world_size())

    def __iter__(self):
        return iter(self.indices)

    def __len__(self):
        return len(self.indices)


class SlidesDataModule:
    def __init__(self, cfg: Config):
        self.cfg = cfg
        gen = torch.Generator().manual_seed(cfg.seed)
        self.prototypes = torch.randn(cfg.grades, cfg.feat, generator=gen)
        self.datasets = {
            Stage.TRAIN: self._make(cfg.train_slides, gen),
            Stage.VAL: self._make(cfg.val_slides, gen),
        }

    def _make(self, n, gen):
        cfg = self.cfg
        grade = torch.randint(cfg.grades, (n,), generator=gen)
        tiles = torch.randn(n, cfg.tiles, cfg.feat, generator=gen)
        lesion = torch.rand(n, cfg.tiles, generator=gen) < 0.25
        tiles += 1.1 * lesion[..., None] * self.prototypes[grade][:, None]
        return TensorDataset(tiles, grade)

    def _get_sampler(self, dataset, stage: Stage) -> Optional[Sampler]:
        if stage == Stage.TRAIN:
            return DistributedSampler(dataset, shuffle=True, seed=self.cfg.seed)
        return ShardSampler(dataset)

    def dataloader(self, stage: Stage):
        dataset = self.datasets[stage]
        if stage == Stage.TRAIN:
            batch_size = self.cfg.batch_size // dist.get_world_size()
        else:
            batch_size = self.cfg.batch_size_val
        return DataLoader(dataset, batch_size=batch_size, drop_last=stage == Stage.TRAIN,
                          sampler=self._get_sampler(dataset, stage))


class TileEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.fc1 = nn.Linear(cfg.feat, cfg.hidden)
        self.fc2 = nn.Linear(cfg.hidden, cfg.hidden)

    def forward(self, x):
        return F.relu(self.fc2(F.relu(self.fc1(x))))


class GatedAttention(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.v = nn.Linear(cfg.hidden, cfg.hidden)
        self.u = nn.Linear(cfg.hidden, cfg.hidden)
        self.w = nn.Linear(cfg.hidden, 1)

    def forward(self, h):
        score = self.w(torch.tanh(self.v(h)) * torch.sigmoid(self.u(h)))
        return (score.softmax(1) * h).sum(1)


class SlideModel(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.encoder = TileEncoder(cfg)
        self.pool = GatedAttention(cfg)
        self.head = nn.Linear(cfg.hidden, cfg.grades)

    def forward(self, tiles):
        return self.head(self.pool(self.encoder(tiles)))


class Trainer:
    def __init__(self, cfg: Config, device):
        self.cfg, self.device = cfg, device
        self.data = SlidesDataModule(cfg)
        torch.manual_seed(cfg.seed)
        model = SlideModel(cfg).to(device)
        for part in (model.encoder, model.pool):
            fully_shard(part)
        self.model = fully_shard(model)
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, weight_decay=1e-2)
        self.weights = torch.tensor(cfg.class_weights, device=device)

    def loss(self, logits, grade):
        # per-slide weighting, so that the mean does not depend on how a batch is split
        return F.cross_entropy(logits, grade, reduction="none") * self.weights[grade]

    def train_epoch(self, loader, epoch):
        self.model.train()
        loader.sampler.set_epoch(epoch)
        total = torch.zeros(2, device=self.device)
        for tiles, grade in loader:
            tiles, grade = tiles.to(self.device), grade.to(self.device)
            loss = self.loss(self.model(tiles), grade).mean()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            total += torch.stack([loss.detach() * len(grade), loss.new_tensor(len(grade))])
        dist.all_reduce(total)
        return (total[0] / total[1]).item()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        k = self.cfg.grades
        confusion = torch.zeros(k * k, device=self.device)
        loss_sum = torch.zeros((), device=self.device)
        for tiles, grade in loader:
            tiles, grade = tiles.to(self.device), grade.to(self.device)
            logits = self.model(tiles)
            loss_sum += self.loss(logits, grade).sum()
            confusion += torch.bincount(grade * k + logits.argmax(-1), minlength=k * k)
        dist.all_reduce(confusion)
        dist.all_reduce(loss_sum)
        confusion = confusion.view(k, k)
        n = confusion.sum().item()
        acc = confusion.diag().sum().item() / n
        half = 1.96 * math.sqrt(max(acc * (1 - acc), 1e-12) / n)
        return {"loss": loss_sum.item() / n, "acc": acc, "ci95": half, "confusion": confusion}

    def fit(self):
        train_loader = self.data.dataloader(Stage.TRAIN)
        val_loader = self.data.dataloader(Stage.VAL)
        best = (-1.0, -1)
        for epoch in range(self.cfg.epochs):
            train_loss = self.train_epoch(train_loader, epoch)
            val = self.validate(val_loader)
            best = max(best, (val["acc"] - val["ci95"], epoch))
            if dist.get_rank() == 0:
                print(f"epoch {epoch}  train {train_loss:.6f}  val {val['loss']:.6f}  "
                      f"acc {val['acc']:.4f} +- {val['ci95']:.4f}")
        if dist.get_rank() == 0:
            rows = [" ".join(f"{int(c):4d}" for c in row) for row in val["confusion"]]
            print("confusion (rows: true grade)\n" + "\n".join(rows))
            print(f"best lower bound of accuracy {best[0]:.4f} in epoch {best[1]}")


def main():
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    device = torch.device("cpu")
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    Trainer(Config(), device).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
