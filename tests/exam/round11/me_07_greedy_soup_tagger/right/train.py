import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from soup import Soup
from tagger import Tagger, make_docs


def cyclic_lr(step, cycle, high, low):
    t = (step % cycle) / (cycle - 1)
    return high + (low - high) * t


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--cycles", type=int, default=6)
    ap.add_argument("--cycle", type=int, default=12, help="steps of a cycle")
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--ckpt-dir")
    ap.add_argument("--ckpt-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(4)
    model = Tagger()
    for m in model.mixers:
        fully_shard(m, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.02, eps=1e-5)
    soup = Soup(model)
    train_x, train_y = make_docs(384, seed=1)
    val_x, val_y = (t.chunk(world)[rank] for t in make_docs(256, seed=2))

    @torch.no_grad()
    def evaluate():
        sums = torch.stack([F.binary_cross_entropy_with_logits(model(val_x), val_y, reduction="sum"), torch.tensor(float(val_y.numel()))])
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).item()

    def path(folder, step):
        return pathlib.Path(folder) / f"at{step:05d}" / f"shard{rank}.pt"

    step = 0
    if args.resume:
        step = max(int(d.name[2:]) for d in pathlib.Path(args.resume).glob("at*"))
        saved = torch.load(path(args.resume, step))
        soup.load(saved["weights"])
        opt.load_state_dict(saved["opt"])
        soup.snapshots = saved["snapshots"]

    while step < args.cycles * args.cycle:
        for group in opt.param_groups:
            group["lr"] = cyclic_lr(step, args.cycle, 2e-2, 2e-3)
        idx = torch.randint(len(train_x), (args.batch,), generator=torch.Generator().manual_seed(900 + step)).chunk(world)[rank]
        loss = F.binary_cross_entropy_with_logits(model(train_x[idx]), train_y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        if step % args.cycle == 0:
            soup.collect()
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if args.ckpt_every and step % args.ckpt_every == 0:
            target = path(args.ckpt_dir, step)
            target.parent.mkdir(parents=True, exist_ok=True)
            weights = [p.to_local() for p in soup.params]
            torch.save({"weights": weights, "opt": opt.state_dict(), "snapshots": soup.snapshots}, target)
            dist.barrier()

    members, val, single = soup.greedy(evaluate)
    if rank == 0:
        print("single models " + " ".join(f"{v:.4f}" for v in single))
        print(f"soup of cycles {sorted(members)}: val loss {val:.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
