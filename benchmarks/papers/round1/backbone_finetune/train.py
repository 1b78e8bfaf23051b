"""Fine-tune a convolutional backbone whose first stages stay as pre-trained."""
import os
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

cfg = SimpleNamespace(
    classes=5,
    widths=(8, 16, 16),
    frozen_stages=2,
    epochs=3,
    iters_per_epoch=12,
    batch=16,
    lr=0.05,
    momentum=0.9,
    weight_decay=1e-4,
    seed=4,
)


class Stage(nn.Module):
    def __init__(self, cin, cout):
        super().__init__()
        self.conv1 = nn.Conv2d(cin, cout, 3, padding=1, bias=False)
        self.norm1 = nn.GroupNorm(4, cout)
        self.conv2 = nn.Conv2d(cout, cout, 3, padding=1, bias=False)
        self.norm2 = nn.GroupNorm(4, cout)

    def forward(self, x):
        x = F.relu(self.norm1(self.conv1(x)))
        x = F.relu(self.norm2(self.conv2(x)))
        return F.max_pool2d(x, 2)


class Backbone(nn.Module):
    """`frozen_stages` counts the stages, from the input side, that aren't trained."""

    def __init__(self, widths, frozen_stages):
        super().__init__()
        self.frozen_stages = frozen_stages
        chans = (3, *widths)
        self.stages = nn.ModuleList(Stage(a, b) for a, b in zip(chans[:-1], chans[1:]))

    def _freeze_stages(self):
        for stage in self.stages[: self.frozen_stages]:
            stage.eval()
            for p in stage.parameters():
                p.requires_grad_(False)

    def train(self, mode=True):
        super().train(mode)
        if mode:
            self._freeze_stages()
        return self

    def forward(self, x):
        for stage in self.stages:
            x = stage(x)
        return x.mean((2, 3))


class Classifier(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.backbone = Backbone(cfg.widths, cfg.frozen_stages)
        self.neck = nn.LayerNorm(cfg.widths[-1])
        self.fc = nn.Linear(cfg.widths[-1], cfg.classes)

    def forward(self, images):
        return self.fc(self.neck(self.backbone(images)))


def load_pretrained(model, seed):
    """Stands for reading a published checkpoint: deterministic backbone weights."""
    g = torch.Generator().manual_seed(seed)
    state = model.backbone.state_dict()
    for key, value in state.items():
        if value.dim() > 1:
            state[key] = torch.randn(value.shape, generator=g) * (2.0 / value[0].numel()) ** 0.5
    model.backbone.load_state_dict(state)


def images(n, seed):
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, cfg.classes, (n,), generator=g)
    grid = torch.linspace(0, 3.14, 16)
    base = torch.sin(grid[None, :] * (label[:, None] + 1))
    x = base[:, None, :, None] * torch.ones(1, 3, 1, 16)
    x = x + 0.6 * torch.randn(x.shape, generator=g)
    return x, label


class Runner:
    def __init__(self, cfg):
        self.cfg = cfg
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        cuda = torch.cuda.is_available()
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        mesh = init_device_mesh(self.device.type, (self.world,))

        torch.manual_seed(cfg.seed)
        model = Classifier(cfg)
        load_pretrained(model, seed=cfg.seed + 1)
        model.to(self.device)
        model.train()
        for stage in model.backbone.stages:
            fully_shard(stage, mesh=mesh)
        self.model = fully_shard(model, mesh=mesh)
        self.optimizer = torch.optim.SGD(
            self.model.parameters(), lr=cfg.lr, momentum=cfg.momentum, weight_decay=cfg.weight_decay
        )
        self.step = 0

    def share(self, n, seed):
        x, y = images(n, seed)
        return x[self.rank::self.world].to(self.device), y[self.rank::self.world].to(self.device)

    def train_epoch(self, epoch):
        total = torch.zeros(1, device=self.device)
        for _ in range(self.cfg.iters_per_epoch):
            x, y = self.share(self.cfg.batch, 500 + self.step)
            loss = F.cross_entropy(self.model(x), y, label_smoothing=0.05)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            total += loss.detach()
            self.step += 1
        dist.all_reduce(total)
        return total.item() / self.world / self.cfg.iters_per_epoch

    @torch.no_grad()
    def val_epoch(self):
        self.model.eval()
        x, y = self.share(64, 77)
        out = self.model(x)
        stat = torch.stack([F.cross_entropy(out, y, reduction="sum"), (out.argmax(1) == y).sum().float()])
        dist.all_reduce(stat)
        self.model.train()
        return (stat / 64).tolist()

    def run(self):
        for epoch in range(self.cfg.epochs):
            loss = self.train_epoch(epoch)
            val, acc = self.val_epoch()
            if self.rank == 0:
                print(f"epoch {epoch}: train {loss:.5f} val {val:.5f} acc {acc:.3f}", flush=True)
        self.model.reshard()
        stem = self.model.backbone.stages[0].conv1.weight.full_tensor().norm()
        fc = self.model.fc.weight.full_tensor().norm()
        if self.rank == 0:
            print(f"|stem| {stem.item():.6f} |fc| {fc.item():.6f}")


if __name__ == "__main__":
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    Runner(cfg).run()
    dist.destroy_process_group()
