"""MoCo on random graphs: a query encoder, a momentum key encoder and a queue of negatives."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

from encoder import GraphEncoder
from memory import KeyQueue

NODES, FEAT = 7, 6


def graphs(step, n):
    """Graphs with a hidden community structure; a view drops edges and perturbs the features."""
    g = torch.Generator().manual_seed(8100 + step)
    kind = torch.randn(n, NODES, 3, generator=g)
    adj = ((kind @ kind.transpose(1, 2)) > 0.3).float() * (1 - torch.eye(NODES))
    nodes = torch.cat([kind, kind.abs()], -1)

    def view():
        drop = torch.triu((torch.rand(n, NODES, NODES, generator=g) > 0.15).float(), 1)
        return nodes + 0.25 * torch.randn(nodes.shape, generator=g), adj * (drop + drop.transpose(1, 2))
    return view(), view()


class MoCo:
    def __init__(self, queue=64, momentum=0.95, temp=0.15):
        torch.manual_seed(19)
        self.q = GraphEncoder()
        self.k = GraphEncoder()
        self.k.load_state_dict(self.q.state_dict())
        self.k.requires_grad_(False)
        for net in (self.q, self.k):
            for r in net.rounds:
                fully_shard(r)
            fully_shard(net, reshard_after_forward=True)
        self.queue = KeyQueue(queue, 16)
        self.m, self.temp = momentum, temp

    def loss(self, view_q, view_k):
        q = self.q(*view_q)
        with torch.no_grad():
            k = self.k(*view_k)
        pos = (q * k).sum(-1, keepdim=True)
        neg = q @ self.queue.keys.t().clone()
        logits = torch.cat([pos, neg], 1) / self.temp
        return F.cross_entropy(logits, torch.zeros(len(q), dtype=torch.long)), k

    @torch.no_grad()
    def follow(self):
        for pk, pq in zip(self.k.parameters(), self.q.parameters()):
            pk.lerp_(pq, 1 - self.m)


def full(t):
    return t.detach().full_tensor() if isinstance(t, DTensor) else t


def save(path, moco, opt, step):
    """One full file, written by rank 0 under a temporary name and then moved into place."""
    blob = {"q": {n: full(p) for n, p in moco.q.named_parameters()}, "k": {n: full(p) for n, p in moco.k.named_parameters()},
            "opt": [{k: full(v) for k, v in opt.state[p].items()} for p in moco.q.parameters()],
            "queue": moco.queue.state_dict(), "step": step}
    if dist.get_rank() == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(blob, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


@torch.no_grad()
def load(path, moco, opt):
    blob = torch.load(path)

    def like(p, t):
        return distribute_tensor(t, p.device_mesh, p.placements)
    for net, part in ((moco.q, blob["q"]), (moco.k, blob["k"])):
        for n, p in net.named_parameters():
            p.copy_(like(p, part[n]))
    for p, st in zip(moco.q.parameters(), blob["opt"]):
        opt.state[p] = {k: (like(p, v) if v.shape == p.shape and v.ndim else v) for k, v in st.items()}
    moco.queue.load_state_dict(blob["queue"])
    return blob["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    moco = MoCo()
    opt = torch.optim.Adagrad(moco.q.parameters(), lr=0.02)
    start = 0
    if args.resume:
        files = [f for f in os.listdir(args.resume) if f.endswith(".pt")]
        start = load(os.path.join(args.resume, max(files, key=lambda f: int(f[5:-3]))), moco, opt)
    n = args.batch // world
    sl = slice(rank * n, (rank + 1) * n)
    for step in range(start, args.steps):
        vq, vk = ((a[sl], b[sl]) for a, b in graphs(step, args.batch))
        loss, keys = moco.loss(vq, vk)
        loss.backward()
        opt.step()
        opt.zero_grad()
        moco.follow()
        moco.queue.push(keys)
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and step % 5 == 0:
            print(f"step {step} loss {mean.item():.5f} head {moco.queue.head}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(os.path.join(args.out, f"moco-{step + 1}.pt"), moco, opt, step + 1)
    if args.export:
        out = {"q": {n: full(p) for n, p in moco.q.named_parameters()}, "k": {n: full(p) for n, p in moco.k.named_parameters()}, "queue": moco.queue.keys}
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
