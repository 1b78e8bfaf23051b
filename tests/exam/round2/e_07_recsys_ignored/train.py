import argparse, os, math
import torch, torch.nn as nn, torch.nn.functional as F
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
    get_model_state_dict,
)


def export(model, path):
    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save(sd, path)
    dist.barrier()


class Recommender(nn.Module):
    def __init__(self, users=40, items=60, d=8):
        super().__init__()
        self.user, self.item = nn.Embedding(users, d), nn.Embedding(items, d)
        self.mlp = nn.Sequential(nn.Linear(2 * d, 32), nn.ReLU(), nn.Linear(32, 16), nn.ReLU(), nn.Linear(16, 1))

    def tables(self):
        return [self.user.weight, self.item.weight]

    def forward(self, u, i):
        return self.mlp(torch.cat([self.user(u), self.item(i)], -1)).squeeze(-1)


def make_clicks(n=1024):
    g = torch.Generator().manual_seed(8)
    u, i = torch.randint(0, 40, (n,), generator=g), torch.randint(0, 60, (n,), generator=g)
    tu, ti = torch.randn(40, 4, generator=g), torch.randn(60, 4, generator=g)
    return u, i, ((tu[u] * ti[i]).sum(-1) > 0).float()


def reduce_tables(tables, world):
    for w in tables:
        dist.all_reduce(w.grad)
        w.grad /= world


def save(out, step, model, dense_opt, table_opt, rank):
    path = os.path.join(out, f"it{step:05d}")
    os.makedirs(path, exist_ok=True)
    torch.save(
        {"model": model.state_dict(), "dense": dense_opt.state_dict(), "tables": table_opt.state_dict(), "step": step},
        os.path.join(path, f"rank{rank}.pt"),
    )
    dist.barrier()
    if rank == 0:
        open(os.path.join(path, "COMPLETE"), "w").close()
    dist.barrier()


def load(folder, model, dense_opt, table_opt, rank):
    done = sorted(d for d in os.listdir(folder) if os.path.exists(os.path.join(folder, d, "COMPLETE")))
    if not done:
        return 0
    ck = torch.load(os.path.join(folder, done[-1], f"rank{rank}.pt"), weights_only=False)
    model.load_state_dict(ck["model"])
    dense_opt.load_state_dict(ck["dense"])
    table_opt.load_state_dict(ck["tables"])
    return ck["step"]


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
    args.batch *= 8
    torch.manual_seed(0)
    model = Recommender()
    # the tables stay whole on every rank (row look-ups), only the dense part is sharded
    fully_shard(model, mesh=mesh, ignored_params=set(model.tables()))
    dense_opt = torch.optim.AdamW(model.mlp.parameters(), lr=args.lr)
    table_opt = torch.optim.Adagrad(model.tables(), lr=0.1)
    start = load(args.resume, model, dense_opt, table_opt, rank) if args.resume else 0
    u, i, y = make_clicks()
    for step in range(start, args.steps):
        idx = torch.randint(0, len(u), (args.batch,), generator=torch.Generator().manual_seed(step))[rank::world]
        loss = F.binary_cross_entropy_with_logits(model(u[idx], i[idx]), y[idx])
        dense_opt.zero_grad()
        table_opt.zero_grad()
        loss.backward()
        reduce_tables(model.tables(), world)
        dense_opt.step()
        table_opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} bce {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, step + 1, model, dense_opt, table_opt, rank)
    if args.export:
        export(model, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
