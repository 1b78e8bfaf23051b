"""Pool-based active learning: every few steps the most uncertain candidates are labelled."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from acquire import choose
from net import Phase
from pool import candidates, oracle


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=40)
    ap.add_argument("--round", type=int, default=4, help="optimizer steps between two acquisitions")
    ap.add_argument("--acquire", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="runs/active")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    pool, test = candidates(512, seed=1), candidates(256, seed=2)
    labelled = torch.arange(16)

    model = Phase()
    mesh = init_device_mesh("cpu", (world,))
    for lin in model.hidden:
        fully_shard(lin, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=0.01)

    full = StateDictOptions(full_state_dict=True, cpu_offload=True)
    step = 0
    if args.resume:
        newest = max(os.listdir(args.resume))
        ck = torch.load(os.path.join(args.resume, newest), weights_only=True)
        set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"],
                       options=StateDictOptions(full_state_dict=True))
        labelled, step = ck["labelled"], ck["step"]

    while step < args.steps:
        if step and step % args.round == 0:
            labelled = torch.cat([labelled, choose(model, pool, labelled, args.acquire, rank, world)])
        g = torch.Generator().manual_seed(step)
        rows = labelled[torch.randint(len(labelled), (args.batch,), generator=g)].chunk(world)[rank]
        x = pool[rows]
        loss = F.cross_entropy(model(x), oracle(x))
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        with torch.no_grad():
            acc = (model(test).argmax(1) == oracle(test)).float().mean()
        dist.all_reduce(loss.detach_())
        if rank == 0 and step % args.round == 0:
            print(f"step {step} labels {len(labelled)} loss {loss.item() / world:.4f} test acc {acc:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt, options=full)
            if rank == 0:
                os.makedirs(args.out, exist_ok=True)
                torch.save({"model": m, "opt": o, "labelled": labelled, "step": step}, f"{args.out}/round_{step:05d}.pt")
            dist.barrier()

    if args.export:
        weights = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if rank == 0:
            torch.save({"weights": weights, "labelled": labelled}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
