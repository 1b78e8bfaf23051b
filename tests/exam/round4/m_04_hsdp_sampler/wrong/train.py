import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)

from dataset import ShardSampler, loader, make
from parallel import hybrid_mesh, wrap


class Classifier(nn.Module):
    def __init__(self, d=10, width=32, depth=3, classes=6):
        super().__init__()
        self.inp = nn.Linear(d, width)
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(depth))
        self.out = nn.Linear(width, classes)

    def forward(self, x):
        x = F.silu(self.inp(x))
        for layer in self.layers:
            x = x + F.silu(layer(x))
        return self.out(x)


def newest(folder):
    return os.path.join(folder, max(d for d in os.listdir(folder) if d.startswith("ckpt_")))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--stop-at", type=int, default=0)
    ap.add_argument("--batch", type=int, default=48)
    ap.add_argument("--replicas", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs")
    ap.add_argument("--resume", default=None)
    ap.add_argument("--export", default=None)
    args = ap.parse_args()

    dist.init_process_group("gloo")
    mesh = hybrid_mesh(args.replicas)
    torch.manual_seed(0)
    model = wrap(Classifier(), mesh)
    opt = torch.optim.SGD(model.parameters(), lr=0.08, momentum=0.9, nesterov=True)
    ds = make()
    sampler = ShardSampler(len(ds), args.batch, data_rank=mesh.get_local_rank("shard"), data_world=mesh.size())
    dl = loader(ds, sampler)

    step = 0
    if args.resume:
        msd, osd = get_state_dict(model, opt)
        st = {"model": msd, "optim": osd, "step": 0}
        dcp.load(st, checkpoint_id=newest(args.resume))
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        step = st["step"]

    last = args.stop_at or args.steps
    while step < last:
        epoch, done = divmod(step, len(sampler))
        sampler.set_epoch(epoch, skip=done)
        for x, y in dl:
            logits = model(x)
            loss = F.cross_entropy(logits, y)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 2.0)
            opt.step()
            opt.zero_grad()
            step += 1
            stats = torch.stack([loss.detach(), (logits.argmax(1) == y).float().mean()])
            dist.all_reduce(stats)
            stats /= dist.get_world_size()
            norm = norm.full_tensor().item()
            if dist.get_rank() == 0 and step % 2 == 0:
                print(f"step {step} loss {stats[0]:.4f} acc {stats[1]:.3f} gnorm {norm:.3f}", flush=True)
            if args.save_every and step % args.save_every == 0:
                msd, osd = get_state_dict(model, opt)
                dcp.save({"model": msd, "optim": osd, "step": step},
                         checkpoint_id=os.path.join(args.out, f"ckpt_{step:04d}"))
            if step >= last:
                break

    if args.export:
        sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(sd, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
