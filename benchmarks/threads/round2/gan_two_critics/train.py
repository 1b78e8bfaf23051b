"""Super-resolution GAN on 1-D signals with two critics: one on the signal, one on its gradient."""
import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

SCALE, LOW = 2, 12


class Residual(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.a = nn.Conv1d(c, c, 3, padding=1)
        self.b = nn.Conv1d(c, c, 3, padding=1)

    def forward(self, x):
        return x + self.b(F.silu(self.a(x)))


class Generator(nn.Module):
    def __init__(self, c=16, depth=2):
        super().__init__()
        self.head = nn.Conv1d(1, c, 3, padding=1)
        self.body = nn.ModuleList(Residual(c) for _ in range(depth))
        self.tail = nn.Conv1d(c, SCALE, 3, padding=1)

    def forward(self, lr):
        x = self.head(lr)
        for block in self.body:
            x = block(x)
        detail = self.tail(x).transpose(1, 2).flatten(1).unsqueeze(1)
        return F.interpolate(lr, scale_factor=SCALE, mode="linear") + detail


class Critic(nn.Module):
    def __init__(self, c=12, depth=1):
        super().__init__()
        self.head = nn.Conv1d(1, c, 3, stride=2, padding=1)
        self.body = nn.ModuleList(Residual(c) for _ in range(depth))
        self.score = nn.Linear(c, 1)

    def forward(self, x):
        x = F.silu(self.head(x))
        for block in self.body:
            x = block(x)
        return self.score(x.mean(-1)).squeeze(-1)


def gradient(x):
    return F.pad(x[..., 1:] - x[..., :-1], (0, 1))


def signals(n, seed):
    gen = torch.Generator().manual_seed(seed)
    t = torch.linspace(0, 1, LOW * SCALE)
    freq = torch.randint(1, 4, (n, 1), generator=gen)
    phase = torch.rand(n, 1, generator=gen)
    wave = torch.sin(2 * torch.pi * (freq * t + phase))
    hr = (wave + 0.6 * torch.sign(wave.roll(3, -1))).unsqueeze(1)
    return F.avg_pool1d(hr, SCALE), hr


class SPSRModel:
    def __init__(self, opt, device):
        self.opt, self.device = opt, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(opt.seed)
        self.nets = {"G": Generator(), "D": Critic(), "D_grad": Critic()}
        for net in self.nets.values():
            net.to(device)
            for block in net.body:
                fully_shard(block)
            fully_shard(net, reshard_after_forward=True)
        rates = {"G": opt.lr, "D": opt.lr_d, "D_grad": opt.lr_d}
        self.optimizers = {name: torch.optim.Adam(net.parameters(), lr=rates[name],
                                                  betas=(0.5, 0.99), eps=1e-4)
                           for name, net in self.nets.items()}

    def feed(self, n, seed):
        return [x[self.rank::self.world].to(self.device) for x in signals(n, seed)]

    def step_critic(self, name, real, fake):
        loss = F.softplus(-self.nets[name](real)).mean() + F.softplus(self.nets[name](fake)).mean()
        loss.backward()
        self.optimizers[name].step()
        self.optimizers[name].zero_grad()
        return loss.detach()

    def optimize(self, it):
        lr, hr = self.feed(self.opt.batch, 100 + it)
        sr = self.nets["G"](lr)
        for name in ("D", "D_grad"):
            self.nets[name].requires_grad_(False)
        adv = F.softplus(-self.nets["D"](sr)).mean()
        adv_grad = F.softplus(-self.nets["D_grad"](gradient(sr))).mean()
        loss = F.mse_loss(sr, hr) + self.opt.w_gan * adv + self.opt.w_grad * adv_grad
        loss.backward()
        self.optimizers["G"].step()
        self.optimizers["G"].zero_grad()
        for name in ("D", "D_grad"):
            self.nets[name].requires_grad_(True)
        sr = sr.detach()
        d = self.step_critic("D", hr, sr)
        d_grad = self.step_critic("D_grad", gradient(hr), gradient(sr))
        logs = torch.stack([loss.detach(), d, d_grad])
        dist.all_reduce(logs)
        return (logs / self.world).tolist()

    @torch.no_grad()
    def validate(self):
        lr, hr = self.feed(64, 9)
        error = (self.nets["G"](lr) - hr).square().mean()
        dist.all_reduce(error)
        return error.item() / self.world

    def save(self, it):
        for name, net in self.nets.items():
            model_state, optim_state = get_state_dict(net, self.optimizers[name])
            dcp.save({"model": model_state, "optim": optim_state, "iter": it},
                     checkpoint_id=Path(self.opt.path) / name)

    def resume(self):
        for name in ("G", "D", "D_grad"):
            net, optimizer = self.nets[name], self.optimizers[name]
            model_state, optim_state = get_state_dict(net, optimizer)
            state = {"model": model_state, "optim": optim_state, "iter": 0}
            dcp.load(state, checkpoint_id=Path(self.opt.path) / name)
            set_state_dict(net, optimizer, model_state_dict=state["model"],
                           optim_state_dict=state["optim"])
        return state["iter"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=32)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--lr-d", type=float, default=2e-3)
    parser.add_argument("--w-gan", type=float, default=0.1)
    parser.add_argument("--w-grad", type=float, default=0.2)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--path", default=None)
    parser.add_argument("--save-iter", type=int, default=0)
    parser.add_argument("--resume", action="store_true")
    opt = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    model = SPSRModel(opt, device)
    start = model.resume() if opt.resume else 0
    for it in range(start, opt.iters):
        g, d, d_grad = model.optimize(it)
        if model.rank == 0 and (it + 1) % 4 == 0:
            print(f"iter {it + 1:3d}  G {g:.6f}  D {d:.6f}  D_grad {d_grad:.6f}", flush=True)
        if opt.save_iter and it + 1 == opt.save_iter:
            model.save(it + 1)
    error = model.validate()
    if model.rank == 0:
        print(f"validation mse {error:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
