import argparse
from pathlib import Path
from types import SimpleNamespace

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from engine import Engine
from meshes import Layout
from net import Net


def build_engine(args, layout):
    torch.manual_seed(15)
    model = Net()
    for layer in model.layers:
        fully_shard(layer, mesh=layout.mesh)
    fully_shard(model, mesh=layout.mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=args.lr)
    warm = torch.optim.lr_scheduler.LinearLR(optim, 0.1, 1.0, total_iters=6)
    decay = torch.optim.lr_scheduler.ExponentialLR(optim, 0.97)
    schedules = torch.optim.lr_scheduler.ChainedScheduler([warm, decay])

    g = torch.Generator().manual_seed(3)
    data = torch.randn(900, 9, generator=g)
    target = torch.stack([data[:, 0] * data[:, 1], data[:, 2:5].sum(1).abs()], 1)

    s = SimpleNamespace(step=0, running=torch.zeros(2))
    engine = Engine(s)

    @engine.on("start")
    def restore(s):
        if args.resume:
            path = max((p for p in Path(args.resume).iterdir()), key=lambda p: int(p.name.split("_")[1]))
            m, o = get_state_dict(model, optim)
            blob = {"model": m, "optim": o, "sched": schedules.state_dict(), "step": 0, "running": s.running}
            dcp.load(blob, checkpoint_id=path)
            set_state_dict(model, optim, model_state_dict=blob["model"], optim_state_dict=blob["optim"])
            schedules.load_state_dict(blob["sched"])
            s.step, s.running = blob["step"], blob["running"]

    @engine.on("before_step")
    def fetch(s):
        ids = torch.randperm(len(data), generator=torch.Generator().manual_seed(s.step))[: args.batch]
        ids = layout.rows(ids)
        s.x, s.y = data[ids], target[ids]

    @engine.on("forward")
    def forward_backward(s):
        s.loss = F.huber_loss(model(s.x), s.y, reduction="sum") * layout.data_world / (args.batch * 2)
        s.loss.backward()

    @engine.on("after_backward")
    def clip(s):
        s.norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).full_tensor()

    @engine.on("update")
    def update(s):
        optim.step()
        schedules.step()
        optim.zero_grad()

    @engine.on("after_step")
    def account(s):
        value = s.loss.detach() / layout.data_world
        dist.all_reduce(value)
        s.running += torch.stack([value, torch.ones(())])

    @engine.on("after_step", every=4)
    def report(s):
        if dist.get_rank() == 0:
            print(
                f"step {s.step:3d} mean loss {(s.running[0] / s.running[1]).item():.4f} norm {s.norm.item():.3f}",
                flush=True,
            )
        s.running.zero_()

    if args.out and args.save_every:

        @engine.on("after_step", every=args.save_every)
        def save(s):
            m, o = get_state_dict(model, optim)
            blob = {"model": m, "optim": o, "sched": schedules.state_dict(), "step": s.step, "running": s.running}
            dcp.save(blob, checkpoint_id=Path(args.out) / f"ckpt_{s.step}")

    return engine


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--batch", type=int, default=36)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    build_engine(args, Layout()).run(args.steps)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
