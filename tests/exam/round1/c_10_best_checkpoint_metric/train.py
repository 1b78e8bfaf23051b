"""Training with early model selection: every rank writes its own shard files, the best step is reloaded for export."""

import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard


class ShardFiles:
    """One file per rank and kind ("best" or "last"); no collective is needed to write or read."""

    def __init__(self, folder, model, opt):
        self.folder, self.model, self.opt = Path(folder), model, opt
        self.folder.mkdir(parents=True, exist_ok=True)

    def _file(self, folder, kind):
        return Path(folder) / f"{kind}.rank{dist.get_rank()}of{dist.get_world_size()}.pt"

    def write(self, kind, **meta):
        shards = {n: p.to_local().detach().clone() for n, p in self.model.named_parameters()}
        moments = [
            {k: (v.to_local() if hasattr(v, "to_local") else v) for k, v in self.opt.state[p].items()}
            for p in self.model.parameters()
        ]
        torch.save({"shards": shards, "moments": moments, "meta": meta}, self._file(self.folder, kind))

    @torch.no_grad()
    def read(self, kind, folder=None, with_optimizer=False):
        blob = torch.load(self._file(folder or self.folder, kind))
        for n, p in self.model.named_parameters():
            p.to_local().copy_(blob["shards"][n])
        if with_optimizer:
            for p, saved in zip(self.model.parameters(), blob["moments"]):
                buf = torch.zeros_like(p)
                buf.to_local().copy_(saved["momentum_buffer"])
                self.opt.state[p]["momentum_buffer"] = buf
        return blob["meta"]


def make_data():
    g = torch.Generator().manual_seed(17)
    x = torch.randn(640, 10, generator=g)
    y = (x[:, :5] * x[:, 5:]).sum(1, keepdim=True) + 0.3 * torch.randn(640, 1, generator=g)
    return (x[:512], y[:512]), (x[512:], y[512:])


def build():
    torch.manual_seed(3)
    model = nn.Sequential(nn.Linear(10, 48), nn.GELU(), nn.Linear(48, 48), nn.GELU(), nn.Linear(48, 1))
    fully_shard(model[2])
    return fully_shard(model)


@torch.no_grad()
def validate(model, x, y):
    rank, world = dist.get_rank(), dist.get_world_size()
    loss = F.mse_loss(model(x[rank::world]), y[rank::world])
    model.reshard()
    dist.all_reduce(loss)
    return loss.item() / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--eval-every", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=12)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    (tx, ty), (vx, vy) = make_data()
    model = build()
    opt = torch.optim.SGD(model.parameters(), lr=0.12, momentum=0.9)
    files = ShardFiles(args.out or args.resume or "/tmp/best_ckpt_run", model, opt)
    step, best, best_step, history = 0, float("inf"), 0, []
    if args.resume:
        meta = files.read("last", folder=args.resume, with_optimizer=True)
        step, best, best_step, history = meta["step"], meta["best"], meta["best_step"], meta["history"]

    while step < args.steps:
        ids = torch.randperm(512, generator=torch.Generator().manual_seed(600 + step))[:64][rank::world]
        loss = F.mse_loss(model(tx[ids]), ty[ids])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        opt.step()
        opt.zero_grad()
        step += 1
        if step % args.eval_every == 0:
            val = validate(model, vx, vy)
            history.append(val)
            if val < best:
                best, best_step = val, step
                files.write("best", step=step, val=val)
            if rank == 0:
                print(f"step {step:3d} train {loss.item():.4f} val {val:.4f} best {best:.4f}", flush=True)
        if step % args.save_every == 0:
            files.write("last", step=step, best=best, best_step=best_step, history=history)

    meta = files.read("best")
    if rank == 0:
        print("exporting the best model:", json.dumps(meta))
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
