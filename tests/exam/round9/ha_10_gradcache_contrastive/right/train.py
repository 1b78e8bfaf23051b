"""Dense retrieval with a batch larger than fits: gradient caching.

1. embed all chunks without a graph, 2. take the gradient of the global loss at the embeddings,
3. embed the chunks again, with a graph, and push the cached gradients through them.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from encoder import Encoder
from losses import embedding_gradients

VOCAB = 90


def examples(step, size):
    g = torch.Generator().manual_seed(40_000 + step)
    topic = torch.randint(0, 15, (size, 1), generator=g)
    own = lambda n: topic * 6 + torch.randint(0, 6, (size, n), generator=g)
    noise = lambda n: torch.randint(0, VOCAB, (size, n), generator=g)
    queries = torch.cat([own(3), noise(1)], 1)
    docs = torch.cat([own(7), noise(3)], 1)
    seeds = (step * size + torch.arange(size)) * 2
    return queries, docs, seeds


class CachedStep:
    def __init__(self, model, chunk, temperature):
        self.model, self.chunk, self.temperature = model, chunk, temperature

    def parts(self, queries, docs, seeds):
        for ids, kind, offset in ((queries, "query", 0), (docs, "doc", 1)):
            for c, s in zip(ids.split(self.chunk), seeds.split(self.chunk)):
                yield c, s + offset, kind

    def __call__(self, queries, docs, seeds):
        parts = list(self.parts(queries, docs, seeds))
        with torch.no_grad():
            embedded = [self.model(*part) for part in parts]
        half = len(embedded) // 2
        loss, dq, dd = embedding_gradients(torch.cat(embedded[:half]), torch.cat(embedded[half:]), self.temperature)
        cached = list(dq.split(self.chunk)) + list(dd.split(self.chunk))
        # FSDP averages over the ranks, while the ranks' parts of the global loss are to be summed
        world = dist.get_world_size()
        for i, (part, grad) in enumerate(zip(parts, cached)):
            self.model.set_requires_gradient_sync(i == len(parts) - 1)
            surrogate = (self.model(*part) * grad).sum() * world
            surrogate.backward()
        return loss


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--chunk", type=int, default=8)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--temperature", type=float, default=0.1)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Encoder(VOCAB)
    fully_shard(model.fc)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01, eps=1e-6)

    def state(step):
        weights, optim = get_state_dict(model, optimizer)
        return {"weights": weights, "optim": optim, "step": step}

    first = 0
    if args.resume:
        newest = max(os.listdir(args.resume), key=lambda n: int(n.removeprefix("s")))
        loaded = state(0)
        dcp.load(loaded, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optimizer, model_state_dict=loaded["weights"], optim_state_dict=loaded["optim"])
        first = loaded["step"]

    cached_step = CachedStep(model, args.chunk, args.temperature)
    n = args.batch // world
    for step in range(first, args.steps):
        mine = [t[rank * n:(rank + 1) * n] for t in examples(step, args.batch)]
        loss = cached_step(*mine)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            print(f"step {step + 1:2d} loss {loss.item():.5f}")
        if args.save_every and (step + 1) % args.save_every == 0 and step + 1 < args.steps:
            dcp.save(state(step + 1), checkpoint_id=os.path.join(args.out, f"s{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
