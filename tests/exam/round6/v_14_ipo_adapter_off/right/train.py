"""IPO preference tuning with adapters. The reference is the same sharded model with its adapters switched off."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from adapted import TinyLM

VOCAB, LENGTH = 18, 10


def full(t):
    return t.full_tensor() if isinstance(t, DTensor) else t


def walks(n, seed, step):
    g = torch.Generator().manual_seed(seed)
    x = [torch.randint(VOCAB, (n,), generator=g)]
    for _ in range(LENGTH):
        jump = torch.where(torch.rand(n, generator=g) < 0.8, step, torch.randint(VOCAB, (n,), generator=g))
        x.append((x[-1] + jump) % VOCAB)
    return torch.stack(x, 1)


def pretrain(model):
    opt = torch.optim.Adam(model.parameters(), lr=1e-2)
    for s in range(25):
        x = torch.cat([walks(16, 2 * s, 1), walks(16, 2 * s + 1, 5)])
        loss = F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()


def mean_logp(model, x):
    return model(x[:, :-1]).log_softmax(-1).gather(-1, x[:, 1:, None]).squeeze(-1).mean(-1)


def preference_batch(step, size, rank, world):
    good, bad = walks(size, 90_000 + step, 5), walks(size, 80_000 + step, 1)
    n = size // world
    return good[rank * n : (rank + 1) * n], bad[rank * n : (rank + 1) * n]


def save(path, model, opt, names, step, rank):
    """All ranks gather, rank 0 writes one file: adapters and moments only."""
    content = {"step": step, "params": {}, "moments": {}}
    for name, p in names.items():
        content["params"][name] = full(p.detach()).clone()
        content["moments"][name] = {k: full(v).clone() for k, v in opt.state[p].items()}
    if rank == 0:
        os.makedirs(os.path.dirname(path), exist_ok=True)
        torch.save(content, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


@torch.no_grad()
def scatter_into(target, value):
    """Copies this rank's rows of a full tensor into the shard."""
    if isinstance(target, DTensor):
        chunks = list(value.chunk(dist.get_world_size()))
        local = target.to_local()
        if local.numel():
            local.copy_(chunks[dist.get_rank()])
    else:
        target.copy_(value)


def load(path, opt, names):
    content = torch.load(path)
    for name, p in names.items():
        scatter_into(p, content["params"][name])
        state = opt.state[p]
        for key, value in content["moments"][name].items():
            if value.dim() == 0:
                state[key] = value.clone()
            else:
                state[key] = torch.zeros_like(p)
                scatter_into(state[key], value)
    return content["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--tau", type=float, default=1.0)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ipo")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(30)
    model = TinyLM()
    pretrain(model)
    model.add_adapters()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    names = {n: p for n, p in model.named_parameters() if p.requires_grad}
    opt = torch.optim.NAdam(names.values(), lr=1e-2)
    step = 0
    if args.resume:
        step = load(os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]), opt, names)

    while step < args.steps:
        good, bad = preference_batch(step, args.batch, rank, world)
        both = torch.cat([good, bad])
        policy = mean_logp(model, both)
        with torch.no_grad(), model.adapters_off():
            reference = mean_logp(model, both)
        gain_good, gain_bad = (policy - reference).chunk(2)
        loss = (gain_good - gain_bad - 1 / (2 * args.tau)).pow(2).mean()
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1
        shown = loss.detach() / world
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step} loss {shown:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            save(os.path.join(args.out, f"adapters_{step:05d}.pt"), model, opt, names, step, rank)

    if args.export:
        weights = {n: full(p.detach()).clone() for n, p in model.named_parameters()}
        if rank == 0:
            torch.save(weights, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
