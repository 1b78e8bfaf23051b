import argparse
import glob
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import TwoTower
from quant import dequantize, export_int8

USERS, ITEMS = 120, 90


def make_ratings(n, seed):
    g = torch.Generator().manual_seed(11)
    uf, vf = torch.randn(USERS, 4, generator=g), torch.randn(ITEMS, 4, generator=g)
    pop = torch.randn(ITEMS, generator=g)
    g = torch.Generator().manual_seed(seed)
    u = torch.randint(USERS, (n,), generator=g)
    # popular items come first in the catalogue
    i = (torch.rand(n, generator=g) ** 2 * ITEMS).long()
    r = (uf[u] * vf[i]).sum(-1) + pop[i] + 0.3 * torch.randn(n, generator=g)
    return u, i, r


def batch_at(data, step, size, rank, world):
    g = torch.Generator().manual_seed(5000 + step)
    idx = torch.randint(len(data[0]), (size,), generator=g).chunk(world)[rank]
    return tuple(t[idx] for t in data)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=120)
    ap.add_argument("--batch", type=int, default=128)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=50)
    ap.add_argument("--resume")
    ap.add_argument("--export", help="where to write the int8 model")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = TwoTower(USERS, ITEMS)
    fully_shard(model.user, mesh=mesh)
    fully_shard(model.item, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.Adagrad(model.parameters(), lr=0.08, initial_accumulator_value=0.01)
    train, test = make_ratings(6000, seed=1), make_ratings(1000, seed=2)

    def snapshot(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "step": torch.tensor(step)}

    start = 0
    if args.resume:
        newest = max(glob.glob(os.path.join(args.resume, "step_*", ".metadata")))
        state = snapshot(0)
        dcp.load(state, checkpoint_id=os.path.dirname(newest))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        start = int(state["step"])

    for step in range(start, args.steps):
        u, i, r = batch_at(train, step, args.batch, rank, world)
        loss = F.mse_loss(model(u, i), r)
        opt.zero_grad()
        loss.backward()
        opt.step()
        if step % 20 == 0 or step == args.steps - 1:
            dist.all_reduce(shown := loss.detach().clone())
            if rank == 0:
                print(f"step {step:4d} mse {shown.item() / world:.4f}", flush=True)
        if args.out and (step + 1) % args.save_every == 0:
            dcp.save(snapshot(step + 1), checkpoint_id=os.path.join(args.out, f"step_{step + 1:06d}"))

    exported = export_int8(model, mesh)
    floats = {k: v.full_tensor() for k, v in model.state_dict().items()}
    if rank == 0:
        plain = TwoTower(USERS, ITEMS).eval()
        for tag, weights in (("float", floats), ("int8", dequantize(exported))):
            plain.load_state_dict(weights)
            with torch.no_grad():
                print(f"test mse {tag}: {F.mse_loss(plain(test[0], test[1]), test[2]).item():.4f}", flush=True)
        if args.export:
            torch.save(exported, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
