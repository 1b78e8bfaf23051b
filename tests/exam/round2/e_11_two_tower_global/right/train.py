import argparse, os, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
import torch.distributed.nn.functional as dnn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
    get_model_state_dict,
)


def save_checkpoint(out, step, model, optim, extra=None):
    msd, osd = get_state_dict(model, optim, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        os.makedirs(out, exist_ok=True)
        tmp = os.path.join(out, f"tmp_{step}.part")
        torch.save({"step": step, "model": msd, "optim": osd, "extra": extra or {}}, tmp)
        os.replace(tmp, os.path.join(out, f"step_{step:06d}.pt"))
    dist.barrier()


def load_checkpoint(folder, model, optim):
    files = sorted(f for f in os.listdir(folder) if f.startswith("step_") and f.endswith(".pt"))
    if not files:
        return 0, {}
    ck = torch.load(os.path.join(folder, files[-1]), map_location="cpu", weights_only=False)
    set_state_dict(
        model,
        optim,
        model_state_dict=ck["model"],
        optim_state_dict=ck["optim"],
        options=StateDictOptions(full_state_dict=True),
    )
    return ck["step"], ck["extra"]


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


class Tower(nn.Module):
    def __init__(self, n, d=16):
        super().__init__()
        self.emb = nn.Embedding(n, d)
        self.net = nn.Sequential(nn.Linear(d, 32), nn.ReLU(), nn.Linear(32, d))

    def forward(self, ids):
        return F.normalize(self.net(self.emb(ids)), dim=-1)


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.user, self.item = Tower(48), Tower(48)
        self.log_temp = nn.Parameter(torch.full((1,), 1.5))

    def forward(self, u, i):
        return self.user(u), self.item(i), self.log_temp.exp() * 1.0


def events(g, n):
    while True:
        u = torch.randperm(48, generator=g)[:n]
        yield u, (u * 5 + 7) % 48


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = TwoTower()
    fully_shard(model.user, mesh=mesh)
    fully_shard(model.item, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr)
    start, g = 0, torch.Generator().manual_seed(31)
    if args.resume:
        start, extra = load_checkpoint(args.resume, model, opt)
        if start:
            g.set_state(extra["stream"])
    n = args.batch // world
    mine = slice(rank * n, (rank + 1) * n)
    for step, (u, i) in zip(range(start, args.steps), events(g, args.batch)):
        zu, zi, temp = model(u[mine], i[mine])
        # negatives of all ranks; the gather passes gradients back (summed over ranks) to the rank that owns each row
        all_u, all_i = torch.cat(dnn.all_gather(zu)), torch.cat(dnn.all_gather(zi))
        goal = torch.arange(n) + rank * n
        loss = (F.cross_entropy(temp * zu @ all_i.t(), goal) + F.cross_entropy(temp * zi @ all_u.t(), goal)) / 2
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save_checkpoint(args.out, step + 1, model, opt, {"stream": g.get_state()})
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
