"""Train a head on a frozen encoder first, then the whole model with a trust ratio per tensor."""
import os
from argparse import ArgumentParser

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, set_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm, self.a, self.b = nn.LayerNorm(width), nn.Linear(width, width), nn.Linear(width, width)
        self.register_buffer("gate", torch.ones(()))

    def forward(self, x):
        gate = self.gate if self.training else 1.0
        return x + gate * self.b(F.relu(self.a(self.norm(x))))


class Net(nn.Module):
    def __init__(self, inputs=16, width=32, classes=5, depth=3):
        super().__init__()
        self.stem = nn.Linear(inputs, width)
        self.encoder = nn.ModuleList(Layer(width) for _ in range(depth))
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, classes))

    def forward(self, x):
        x = self.stem(x)
        for layer in self.encoder:
            x = layer(x)
        return self.head(x)


def points(seed, rows):
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 16, generator=g)
    score = x[:, 0] * x[:, 1] + x[:, 2] - 0.5 * x[:, 3].abs()
    return x, torch.bucketize(score, torch.tensor([-1.5, -0.7, 0.1, 1.0]))


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(11)
        self.model = Net()
        for layer in self.model.encoder:
            fully_shard(layer)
        fully_shard(self.model)
        self.momentum = {n: torch.zeros_like(p) for n, p in self.model.named_parameters()}
        self.step, self.history = 0, []
        self.freeze(True)

    def freeze(self, frozen):
        for name, p in self.model.named_parameters():
            p.requires_grad_(not frozen or name.startswith("head"))

    def local(self, x, y):
        return x[self.rank :: self.world], y[self.rank :: self.world]

    def set_gates(self):
        g = torch.Generator().manual_seed(500 + self.step)
        for layer in self.model.encoder:
            keep = (torch.rand((), generator=g) < 0.9).float()
            layer.gate.fill_(keep / 0.9)

    def clip(self):
        grads = [p.grad for p in self.model.parameters() if p.grad is not None]
        total = sum(g.to_local().pow(2).sum() for g in grads)
        dist.all_reduce(total)
        scale = min(1.0, self.args.max_norm / (total.sqrt().item() + 1e-6))
        for g in grads:
            g.mul_(scale)

    @torch.no_grad()
    def update(self):
        tuning = self.step >= self.args.unfreeze_at
        for name, p in self.model.named_parameters():
            if p.grad is None:
                continue
            m = self.momentum[name].mul_(0.9).add_(p.grad)
            ratio = 1.0
            if tuning:
                norm, size = p.norm().full_tensor().item(), m.norm().full_tensor().item()
                ratio = min(2.0, norm / (size + 1e-3)) * 0.2
            p.add_(m, alpha=-self.args.lr * ratio)
            p.grad = None

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        x, y = self.local(*points(31_337, 320))
        right = (self.model(x).argmax(1) == y).sum()
        self.model.reshard()
        dist.all_reduce(right)
        self.model.train()
        return right.item() / 320

    def train_step(self):
        if self.step == self.args.unfreeze_at:
            self.freeze(False)
        self.set_gates()
        x, y = self.local(*points(self.step, 48))
        loss = F.cross_entropy(self.model(x), y)
        loss.backward()
        if self.args.max_norm:
            self.clip()
        self.update()
        self.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        self.history.append(mean.item() / self.world)

    def fit(self):
        try:
            while self.step < self.args.steps:
                self.train_step()
                if self.step % self.args.eval_every == 0:
                    self.report(f"accuracy {self.evaluate():.4f}")
                if self.step == self.args.save_at:
                    self.save()
        finally:
            self.report(f"ended, loss {self.history[-1] if self.history else float('nan'):.5f}")
        return self.history

    def report(self, words):
        if self.rank == 0:
            print(f"[{self.step}] {words}", flush=True)

    def state(self):
        return {"model": get_model_state_dict(self.model), "momentum": self.momentum, "step": self.step}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.args.out, f"{self.step:04d}"))

    def resume(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_model_state_dict(self.model, state["model"])
        self.step = state["step"]
        self.freeze(self.step < self.args.unfreeze_at)


if __name__ == "__main__":
    parser = ArgumentParser()
    parser.add_argument("--steps", type=int, default=80)
    parser.add_argument("--lr", type=float, default=0.05)
    parser.add_argument("--unfreeze-at", type=int, default=40)
    parser.add_argument("--eval-every", type=int, default=32)
    parser.add_argument("--max-norm", type=float, default=0.0)
    parser.add_argument("--save-at", type=int, default=0)
    parser.add_argument("--out", default="ckpt")
    parser.add_argument("--resume", default="")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(options)
    if options.resume:
        trainer.resume(options.resume)
    losses = trainer.fit()
    trainer.report(f"first {losses[0]:.5f} last {losses[-1]:.5f}")
    dist.destroy_process_group()
