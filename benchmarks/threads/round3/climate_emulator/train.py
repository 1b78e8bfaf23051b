"""Next-step emulator for a small advected field on a periodic grid.

The "simulator" is a spectral shift plus diffusion with a source term; the
network learns the increment from one state to the next.  Validation is done
with an exponential moving average of the weights.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

GRID = 16
CHANNELS = 3


def simulate(n, seed):
    g = torch.Generator().manual_seed(seed)
    k = torch.fft.fftfreq(GRID) * GRID
    kx, ky = torch.meshgrid(k, k, indexing="ij")
    k2 = kx ** 2 + ky ** 2
    spec = torch.complex(torch.randn(n, CHANNELS, GRID, GRID, generator=g),
                         torch.randn(n, CHANNELS, GRID, GRID, generator=g))
    state = torch.fft.ifft2(spec * torch.exp(-0.12 * k2)).real
    state = state / state.std(dim=(2, 3), keepdim=True)
    phase = torch.exp(-2j * math.pi * (kx + 0.5 * ky) / GRID) * torch.exp(-0.02 * k2)
    nxt = torch.fft.ifft2(torch.fft.fft2(state) * phase).real
    nxt = nxt + 0.1 * torch.tanh(state.roll(1, dims=1))
    return state, nxt


class PeriodicBlock(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.conv1 = nn.Conv2d(width, width * 2, 3, padding=1, padding_mode="circular")
        self.conv2 = nn.Conv2d(width * 2, width, 3, padding=1, padding_mode="circular")
        self.norm = nn.GroupNorm(4, width)

    def forward(self, x):
        return x + self.conv2(F.gelu(self.conv1(self.norm(x))))


class Emulator(nn.Module):
    def __init__(self, width=24, depth=3):
        super().__init__()
        self.encode = nn.Conv2d(CHANNELS, width, 1)
        self.blocks = nn.ModuleList(PeriodicBlock(width) for _ in range(depth))
        self.decode = nn.Conv2d(width, CHANNELS, 1)

    def forward(self, x):
        h = self.encode(x)
        for block in self.blocks:
            h = block(h)
        return x + self.decode(h)


class EMATracker(Stateful):
    """Moving average of the (sharded) parameters."""

    def __init__(self, model, decay):
        self.decay = decay
        self.num_updates = 0
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}

    @torch.no_grad()
    def update(self, model):
        for name, p in model.named_parameters():
            if self.num_updates == 0:
                self.shadow[name].copy_(p.detach())
            else:
                self.shadow[name].mul_(self.decay).add_(p.detach(), alpha=1.0 - self.decay)
        self.num_updates += 1

    @torch.no_grad()
    def swap(self, model):
        for name, p in model.named_parameters():
            keep = p.detach().clone()
            p.copy_(self.shadow[name])
            self.shadow[name].copy_(keep)

    def state_dict(self):
        return {"shadow": self.shadow, "num_updates": self.num_updates}

    def load_state_dict(self, state):
        self.shadow = state["shadow"]
        self.num_updates = state["num_updates"]


class Progress(Stateful):
    def __init__(self):
        self.step = 0

    def state_dict(self):
        return {"step": self.step}

    def load_state_dict(self, state):
        self.step = state["step"]


class Weights(Stateful):
    def __init__(self, model, optim):
        self.model, self.optim = model, optim

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optim, model_state_dict=state["model"],
                       optim_state_dict=state["optim"])


class Trainer:
    def __init__(self, args, device):
        self.args, self.device = args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = Emulator().to(device)
        for block in self.model.blocks:
            fully_shard(block, reshard_after_forward=True)
        fully_shard(self.model, reshard_after_forward=True)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=1e-4)
        self.ema = EMATracker(self.model, args.ema_decay)
        self.progress = Progress()
        self.x, self.y = (t.to(device) for t in simulate(256, seed=11))
        self.vx, self.vy = (t.to(device) for t in simulate(32, seed=12))

    def checkpointables(self):
        return {
            "weights": Weights(self.model, self.optim),
            "ema": self.ema,
            "progress": self.progress,
        }

    def save(self, path):
        dcp.save(self.checkpointables(), checkpoint_id=path)

    def resume(self, path):
        dcp.load(self.checkpointables(), checkpoint_id=path)

    def local(self, idx):
        return idx.tensor_split(self.world)[self.rank].to(self.device)

    def mean(self, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return (value / self.world).item()

    def train_step(self):
        g = torch.Generator().manual_seed(1000 + self.progress.step)
        idx = self.local(torch.randperm(len(self.x), generator=g)[: self.args.batch])
        loss = F.mse_loss(self.model(self.x[idx]), self.y[idx])
        self.optim.zero_grad()
        loss.backward()
        self.optim.step()
        self.ema.update(self.model)
        self.progress.step += 1
        return self.mean(loss)

    @torch.no_grad()
    def validate(self):
        self.ema.swap(self.model)
        idx = self.local(torch.arange(len(self.vx)))
        loss = self.mean(F.mse_loss(self.model(self.vx[idx]), self.vy[idx]))
        self.ema.swap(self.model)
        return loss

    def fit(self):
        while self.progress.step < self.args.steps:
            loss = self.train_step()
            if self.rank == 0:
                print(f"step {self.progress.step:3d} loss {loss:.6f}", flush=True)
            if self.progress.step % self.args.val_every == 0:
                val = self.validate()
                if self.rank == 0:
                    print(f"step {self.progress.step:3d} val(ema) {val:.6f}", flush=True)
            if self.args.save and self.progress.step == self.args.save_at:
                self.save(self.args.save)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=24)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--ema-decay", type=float, default=0.9)
    p.add_argument("--val-every", type=int, default=4)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save", default="", help="checkpoint directory to write")
    p.add_argument("--save-at", type=int, default=12)
    p.add_argument("--resume", default="", help="checkpoint directory to continue from")
    args = p.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    else:
        device = torch.device("cpu")
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    trainer = Trainer(args, device)
    if args.resume:
        trainer.resume(args.resume)
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
