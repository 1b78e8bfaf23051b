"""Forward-Forward training of an image classifier: no gradient passes from one layer to another. Every layer is an
FSDP root of its own with its own loss, threshold and optimizer."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

CLASSES, SIDE = 5, 8


def layer_norm_free(x):
    return x / (x.flatten(1).norm(dim=1, keepdim=True) + 1e-4)


class FFLayer(nn.Module):
    def __init__(self, nin, nout, threshold):
        super().__init__()
        self.lin = nn.Linear(nin, nout)
        self.threshold = threshold

    def forward(self, x):
        return F.relu(self.lin(layer_norm_free(x)))

    def goodness(self, h):
        return h.pow(2).sum(1)


def dataset(n, seed):
    proto = torch.randn(CLASSES, SIDE * SIDE, generator=torch.Generator().manual_seed(99))
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    return proto[y] + 0.8 * torch.randn(n, SIDE * SIDE, generator=g), y


def embed(x, y):
    return torch.cat([2.0 * F.one_hot(y, CLASSES).float(), x], 1)


class Learner:
    """A layer with all that belongs to it."""

    def __init__(self, layer, lr, stop_at):
        self.layer, self.stop_at = layer, stop_at
        self.opt = torch.optim.Adam(layer.parameters(), lr=lr, betas=(0.9, 0.95), eps=1e-5)
        self.steps = 0
        self.balance = torch.zeros(2)      # running goodness of positive and negative data

    def learn(self, pos, neg):
        """one local update (if this layer still learns); returns the inputs of the next layer"""
        h = self.layer(torch.cat([pos, neg]))
        good = self.layer.goodness(h)
        g_pos, g_neg = good.chunk(2)
        loss = F.softplus(torch.cat([self.layer.threshold - g_pos, g_neg - self.layer.threshold])).mean()
        if self.steps < self.stop_at:
            self.opt.zero_grad()
            loss.backward()
            self.opt.step()
            self.steps += 1
        else:
            self.layer.reshard()
        stat = torch.stack([g_pos.detach().mean(), g_neg.detach().mean(), loss.detach()])
        dist.all_reduce(stat)
        stat /= dist.get_world_size()
        self.balance.lerp_(stat[:2], 0.1)
        # the outputs computed before the update are passed on, cut from the graph
        p, n = h.detach().chunk(2)
        return p, n, stat[2].item()

    def state(self):
        m, o = get_state_dict(self.layer, self.opt)
        return {"layer": m, "opt": o, "steps": self.steps, "balance": self.balance}

    def restore(self, s):
        set_state_dict(self.layer, self.opt, model_state_dict=s["layer"], optim_state_dict=s["opt"])
        self.steps, self.balance = s["steps"], s["balance"]


def negatives(y, gen):
    """wrong labels, drawn for the whole batch"""
    return (y + torch.randint(1, CLASSES, y.shape, generator=gen)) % CLASSES


@torch.no_grad()
def accuracy(learners, x, y, rank, world):
    part = torch.arange(len(y)).chunk(world)[rank]
    x, y = x[part], y[part]
    total = torch.zeros(len(y), CLASSES)
    for c in range(CLASSES):
        h = embed(x, torch.full_like(y, c))
        for i, L in enumerate(learners):
            h = L.layer(h)
            L.layer.reshard()
            if i > 0:
                total[:, c] += L.layer.goodness(h)
    hits = (total.argmax(1) == y).sum()
    dist.all_reduce(hits)
    return hits.item() / 100


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ff")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))

    torch.manual_seed(4)
    sizes = [SIDE * SIDE + CLASSES, 64, 48, 32]
    learners = []
    for i, (a, b) in enumerate(zip(sizes, sizes[1:])):
        layer = FFLayer(a, b, threshold=0.4 + 0.2 * i)
        fully_shard(layer, mesh=mesh)
        # lower layers stop earlier
        learners.append(Learner(layer, lr=0.01 / (1 + 0.5 * i), stop_at=args.steps - 6 * (2 - i)))

    x, y = dataset(400, 1)
    vx, vy = dataset(100, 2)
    gen = torch.Generator().manual_seed(5)
    step = 0
    if args.resume:
        last = sorted(os.listdir(args.resume), key=int)[-1]
        state = {f"l{i}": L.state() for i, L in enumerate(learners)}
        state.update(step=0, gen=gen.get_state())
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        for i, L in enumerate(learners):
            L.restore(state[f"l{i}"])
        gen.set_state(state["gen"])
        step = state["step"]

    while step < args.steps:
        idx = torch.randint(0, len(y), (20,), generator=gen)
        wrong = negatives(y[idx], gen)
        mine = torch.arange(20).chunk(world)[rank]
        pos, neg = embed(x[idx[mine]], y[idx[mine]]), embed(x[idx[mine]], wrong[mine])
        losses = []
        for L in learners:
            pos, neg, value = L.learn(pos, neg)
            losses.append(f"{value:.4f}")
        step += 1
        if rank == 0:
            print(f"step {step} losses", *losses)
        if step % 10 == 0:
            acc = accuracy(learners, vx, vy, rank, world)
            if rank == 0:
                print(f"accuracy {acc:.3f}")
        if args.save_every and step % args.save_every == 0:
            state = {f"l{i}": L.state() for i, L in enumerate(learners)}
            state.update(step=step, gen=gen.get_state())
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(step)))

    if args.export:
        out = {}
        for i, L in enumerate(learners):
            for n, p in L.layer.named_parameters():
                out[f"{i}.{n}"] = (p.full_tensor() if isinstance(p, DTensor) else p).detach()
            out[f"{i}.balance"] = L.balance
        if rank == 0:
            torch.save(out, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
