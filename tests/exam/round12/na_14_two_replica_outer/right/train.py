"""Low-communication pre-training: two replicas (two data centres, say), each sharded over its own half of the ranks."""
import argparse

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import store
from lm import SmallLM
from outer import OuterNesterov

VOCAB, CTX = 32, 16


def tokens(step, replica, rows):
    """Each replica reads its own stream."""
    g = torch.Generator().manual_seed(100_000 * (replica + 1) + step)
    x = torch.randint(VOCAB, (rows, 1), generator=g)
    cols = [x]
    for _ in range(CTX):
        jump = torch.randint(2, (rows, 1), generator=g)
        cols.append((cols[-1] * 3 + 1 + jump * 4) % VOCAB)
    return torch.cat(cols, 1)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--inner-steps", type=int, default=5)
    ap.add_argument("--rows", type=int, default=8, help="rows of a replica in a step")
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--out", default="")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    a = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    replicas = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh("cpu", (replicas, world // replicas), mesh_dim_names=("replica", "shard"))
    replica, part = mesh.get_local_rank("replica"), mesh.get_local_rank("shard")

    torch.manual_seed(9)
    model = SmallLM(VOCAB)
    for b in model.blocks:
        fully_shard(b, mesh=mesh["shard"])
    fully_shard(model, mesh=mesh["shard"])
    inner = torch.optim.AdamW(model.parameters(), lr=a.lr, weight_decay=0.02)
    outer = OuterNesterov(model.parameters(), mesh.get_group("replica"))

    begin = store.load_latest(a.resume, rank, model, inner, outer) if a.resume else 0
    for step in range(begin + 1, a.steps + 1):
        x = tokens(step, replica, a.rows).chunk(world // replicas)[part]
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        loss.backward()
        inner.step()
        inner.zero_grad()
        if step % a.inner_steps == 0:
            outer.step()
        if step % 5 == 0 or step == 1:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.4f}", flush=True)
        if a.out and a.save_every and step % a.save_every == 0:
            store.save(a.out, step, rank, model, inner, outer)
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
