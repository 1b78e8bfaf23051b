"""Regression on sensor windows; a few readings are broken, and updates with a loss spike are dropped."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard


class SpikeGuard:
    """Refuses an update whose loss is far above the running mean of the accepted ones."""

    def __init__(self, factor=2.0, beta=0.8, grace=4):
        self.factor, self.beta, self.grace = factor, beta, grace
        self.mean, self.seen, self.dropped = 0.0, 0, 0

    def accept(self, loss):
        if self.seen >= self.grace and loss > self.factor * self.mean:
            self.dropped += 1
            return False
        self.mean = loss if self.seen == 0 else self.beta * self.mean + (1 - self.beta) * loss
        self.seen += 1
        return True

    def state_dict(self):
        return {"mean": self.mean, "seen": self.seen, "dropped": self.dropped}

    def load_state_dict(self, sd):
        self.mean, self.seen, self.dropped = sd["mean"], sd["seen"], sd["dropped"]


class ConvNet(nn.Module):
    def __init__(self, ch=12):
        super().__init__()
        self.c1 = nn.Conv1d(3, ch, 3, padding=1)
        self.c2 = nn.Conv1d(ch, ch, 3, padding=1)
        self.fc = nn.Linear(ch * 8, 2)

    def forward(self, x):
        h = torch.relu(self.c1(x))
        h = h + torch.relu(self.c2(h))
        return self.fc(h.flatten(1))


def batch_at(step, size):
    g = torch.Generator().manual_seed(900 + step)
    x = torch.randn(size, 3, 8, generator=g)
    y = torch.stack([x[:, 0].mean(1) * 3, (x[:, 1] * x[:, 2]).mean(1) * 2], dim=1)
    broken = torch.rand(size, generator=g) < 0.006
    y = torch.where(broken[:, None], y + 25.0, y)
    return x, y


def save(root, step, model, opt, guard):
    m, o = get_state_dict(model, opt)
    dcp.save({"m": m, "o": o, "guard": guard.state_dict(), "step": step}, checkpoint_id=f"{root}/ck{step:04d}")


def resume(root, model, opt, guard):
    m, o = get_state_dict(model, opt)
    st = {"m": m, "o": o, "guard": guard.state_dict(), "step": 0}
    dcp.load(st, checkpoint_id=os.path.join(root, sorted(f for f in os.listdir(root) if f.startswith("ck"))[-1]))
    set_state_dict(model, opt, model_state_dict=st["m"], optim_state_dict=st["o"])
    guard.load_state_dict(st["guard"])
    return st["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(4)
    model = ConvNet()
    fully_shard(model.c2)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-6)
    guard = SpikeGuard()
    first = resume(args.resume, model, opt, guard) if args.resume else 0

    for step in range(first, args.stop_at or args.steps):
        x, y = (t.view(world, -1, *t.shape[1:])[rank] for t in batch_at(step, args.batch))
        loss = nn.functional.mse_loss(model(x), y)
        loss.backward()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        mean_loss = mean_loss.item() / world
        if guard.accept(mean_loss):
            opt.step()
        opt.zero_grad()
        if rank == 0:
            print(f"step {step + 1:02d} loss {mean_loss:.4f} dropped {guard.dropped}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, opt, guard)

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
