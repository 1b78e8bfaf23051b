#!/usr/bin/env python
# One-box detector on synthetic images: a bright rectangle of one of three textures
# is drawn on noise, the network predicts its class and its (cx, cy, w, h).
#
#   torchrun --nproc_per_node 2 train.py --epochs 4
import argparse
import copy
import math
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard


@dataclass
class Exp:
    image: int = 24
    classes: int = 3
    train_images: int = 192
    val_images: int = 48
    batch: int = 24
    epochs: int = 4
    lr: float = 0.03
    momentum: float = 0.9
    ema_decay: float = 0.98
    seed: int = 7


def draw(n, size, seed):
    rng = torch.Generator().manual_seed(seed)
    img = 0.3 * torch.randn(n, 1, size, size, generator=rng)
    cls = torch.randint(0, 3, (n,), generator=rng)
    wh = torch.randint(6, 13, (n, 2), generator=rng)
    x0 = (torch.rand(n, generator=rng) * (size - wh[:, 0])).long()
    y0 = (torch.rand(n, generator=rng) * (size - wh[:, 1])).long()
    yy, xx = torch.meshgrid(torch.arange(size), torch.arange(size), indexing="ij")
    textures = torch.stack([torch.ones(size, size), (xx % 2).float() * 2, ((xx + yy) % 3).float()])
    for i in range(n):
        ys, xs = slice(y0[i], y0[i] + wh[i, 1]), slice(x0[i], x0[i] + wh[i, 0])
        img[i, 0, ys, xs] += textures[cls[i], ys, xs]
    box = torch.stack([x0 + wh[:, 0] / 2, y0 + wh[:, 1] / 2, wh[:, 0], wh[:, 1]], dim=1).float() / size
    return img, cls, box


def conv_block(cin, cout, stride):
    return nn.Sequential(
        nn.Conv2d(cin, cout, 3, stride=stride, padding=1, bias=False),
        nn.GroupNorm(4, cout),
        nn.SiLU(),
        nn.Conv2d(cout, cout, 3, padding=1),
        nn.SiLU(),
    )


class Detector(nn.Module):
    def __init__(self, exp):
        super().__init__()
        self.backbone = nn.ModuleList(
            [conv_block(1, 16, 1), conv_block(16, 32, 2), conv_block(32, 32, 2)]
        )
        feat = 32 * (exp.image // 4) ** 2
        self.cls_head = nn.Linear(feat, exp.classes)
        self.box_head = nn.Linear(feat, 4)

    def forward(self, x):
        for stage in self.backbone:
            x = stage(x)
        x = x.flatten(1)
        return self.cls_head(x), self.box_head(x).sigmoid()


def detection_loss(out, cls, box):
    logits, pred = out
    return nn.functional.cross_entropy(logits, cls) + 5.0 * nn.functional.l1_loss(pred, box)


def shard(model):
    for stage in model.backbone:
        fully_shard(stage)
    fully_shard(model)
    return model


class ModelEMA:
    """A second sharded copy of the network that follows the trained one."""

    def __init__(self, exp, model, device):
        self.net = shard(Detector(exp).to(device)).requires_grad_(False)
        self.decay = exp.ema_decay
        self.updates = 0
        set_model_state_dict(self.net, copy.deepcopy(get_model_state_dict(model)))

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = self.decay * (1 - math.exp(-self.updates / 8))
        source = get_model_state_dict(model)
        for name, avg in get_model_state_dict(self.net).items():
            avg.mul_(d).add_(source[name], alpha=1 - d)


class Trainer:
    def __init__(self, exp, args):
        self.exp, self.args = exp, args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
        torch.manual_seed(exp.seed)
        self.model = shard(Detector(exp).to(self.device))
        self.ema = ModelEMA(exp, self.model, self.device)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=exp.lr, momentum=exp.momentum, nesterov=True)
        self.train_set = [t.to(self.device) for t in draw(exp.train_images, exp.image, 100)]
        self.val_set = [t.to(self.device) for t in draw(exp.val_images, exp.image, 200)]
        self.start_epoch = 0
        if args.resume:
            self.load_ckpt(args.resume)

    def save_ckpt(self, path, epoch):
        state = {
            "start_epoch": epoch + 1,
            "model": get_model_state_dict(self.model),
            "ema": get_model_state_dict(self.ema.net),
            "ema_updates": self.ema.updates,
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        dcp.save(state, checkpoint_id=path)

    def load_ckpt(self, path):
        state = {
            "start_epoch": 0,
            "model": get_model_state_dict(self.model),
            "ema": get_model_state_dict(self.ema.net),
            "ema_updates": 0,
            "optimizer": get_optimizer_state_dict(self.model, self.optimizer),
        }
        dcp.load(state, checkpoint_id=path)
        set_model_state_dict(self.model, state["model"])
        set_model_state_dict(self.ema.net, state["ema"])
        set_optimizer_state_dict(self.model, self.optimizer, state["optimizer"])
        self.ema.updates = state["ema_updates"]
        self.start_epoch = state["start_epoch"]

    def part(self, data, idx):
        mine = idx.chunk(self.world)[self.rank].to(self.device)
        return [t[mine] for t in data]

    def average(self, t):
        t = t.detach().clone()
        dist.all_reduce(t)
        return t.item() / self.world

    def adjust_lr(self, it, total):
        lr = self.exp.lr * 0.5 * (1 + math.cos(math.pi * it / total))
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def train_one_epoch(self, epoch):
        exp = self.exp
        iters = exp.train_images // exp.batch
        order = torch.randperm(exp.train_images, generator=torch.Generator().manual_seed(exp.seed * 1000 + epoch))
        for i in range(iters):
            self.adjust_lr(epoch * iters + i, exp.epochs * iters)
            img, cls, box = self.part(self.train_set, order[i * exp.batch:(i + 1) * exp.batch])
            loss = detection_loss(self.model(img), cls, box)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad(set_to_none=True)
            self.ema.update(self.model)
            value = self.average(loss)
            if self.rank == 0:
                print(f"epoch {epoch} iter {i} loss {value:.6f}", flush=True)

    @torch.no_grad()
    def evaluate(self, epoch):
        img, cls, box = self.part(self.val_set, torch.arange(self.exp.val_images))
        out = self.ema.net(img)
        for stage in [*self.ema.net.backbone, self.ema.net]:
            stage.reshard()
        value = self.average(detection_loss(out, cls, box))
        acc = self.average((out[0].argmax(1) == cls).float().mean())
        if self.rank == 0:
            print(f"epoch {epoch} val loss {value:.6f} acc {acc:.3f}", flush=True)

    def train(self):
        for epoch in range(self.start_epoch, self.exp.epochs):
            self.train_one_epoch(epoch)
            self.evaluate(epoch)
            if self.args.save and epoch == self.args.save_epoch:
                self.save_ckpt(self.args.save, epoch)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=Exp.epochs)
    parser.add_argument("--save", default=None)
    parser.add_argument("--save-epoch", type=int, default=1)
    parser.add_argument("--resume", default=None)
    cli = parser.parse_args()

    cuda = torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(int(os.environ.get("LOCAL_RANK", 0)))
    dist.init_process_group("nccl" if cuda else "gloo")
    Trainer(Exp(epochs=cli.epochs), cli).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
