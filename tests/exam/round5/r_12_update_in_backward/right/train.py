"""Language-like next-token model whose optimizers run inside backward: one small optimizer per parameter, in a hook."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

VOCAB, LEN, DIM = 32, 12, 24


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.proj = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, x):
        q, k, v = (t.unsqueeze(1) for t in self.qkv(self.norm1(x)).chunk(3, -1))
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v, is_causal=True).squeeze(1))
        return x + self.mlp(self.norm2(x))


class Lm(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(LEN, DIM)
        self.layers = nn.ModuleList(Layer() for _ in range(2))
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


def batch(step, size, rank, world):
    """Walks of constant stride on a ring; the batch is drawn whole on each rank, then cut."""
    g = torch.Generator().manual_seed(4321 + step)
    start = torch.randint(0, VOCAB, (size, 1), generator=g)
    stride = torch.randint(1, 4, (size, 1), generator=g)
    ids = (start + stride * torch.arange(LEN + 1)) % VOCAB
    return ids.chunk(world)[rank]


def attach_optimizers(model, **kw):
    """p.grad never outlives the backward pass: it is used and dropped as soon as it is complete."""
    optimizers = {}
    for name, p in model.named_parameters():
        opt = torch.optim.AdamW([p], weight_decay=0.0 if p.ndim < 2 else 0.05, **kw)
        optimizers[name] = opt

        def hook(param, opt=opt):
            opt.step()
            opt.zero_grad()

        p.register_post_accumulate_grad_hook(hook)
    return optimizers


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--global-batch", type=int, default=32)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    model = Lm()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizers = attach_optimizers(model, lr=1e-2)
    every = list(optimizers.values())

    done = 0
    if args.resume:
        newest = max(os.listdir(args.resume))
        m, o = get_state_dict(model, every)
        state = {"model": m, "optim": o, "done": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, every, model_state_dict=state["model"], optim_state_dict=state["optim"])
        done = state["done"]

    while done < args.steps:
        lr = 1e-2 * min(1.0, (done + 1) / 5) * (1 - 0.5 * done / 100)
        for opt in every:
            opt.param_groups[0]["lr"] = lr
        ids = batch(done, args.global_batch, rank, world)
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        done += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0:
            print(f"step {done} loss {mean.item():.4f} lr {lr:.5f}", flush=True)
        if args.save_every and args.out and done % args.save_every == 0:
            m, o = get_state_dict(model, every)
            dcp.save({"model": m, "optim": o, "done": done}, checkpoint_id=os.path.join(args.out, f"{done:06d}"))

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
