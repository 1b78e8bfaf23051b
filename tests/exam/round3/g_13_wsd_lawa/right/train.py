import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from averaging import Ring
from corpus import VOCAB, T, rows
from schedule import wsd


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.ln1, self.ln2 = nn.LayerNorm(d), nn.LayerNorm(d)
        self.qkv, self.o = nn.Linear(d, 3 * d, bias=False), nn.Linear(d, d)
        self.mlp = nn.Sequential(nn.Linear(d, 2 * d), nn.GELU(), nn.Linear(2 * d, d))

    def forward(self, x):
        q, k, v = self.qkv(self.ln1(x)).chunk(3, -1)
        x = x + self.o(F.scaled_dot_product_attention(q, k, v, is_causal=True))
        return x + self.mlp(self.ln2(x))


class LM(nn.Module):
    def __init__(self, d=24):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, d), nn.Embedding(T, d)
        self.blocks = nn.ModuleList(Block(d) for _ in range(2))
        self.head = nn.Linear(d, VOCAB)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False) if self.training else b(x)
        return self.head(x)


def loss_of(model, x):
    return F.cross_entropy(model(x[:, :-1]).flatten(0, 1), x[:, 1:].flatten())


def mean_over_ranks(value):
    value = value.detach().clone()
    dist.all_reduce(value)
    return (value / dist.get_world_size()).item()


@torch.no_grad()
def evaluate(model, rank, world):
    model.eval()
    value = mean_over_ranks(loss_of(model, rows("valid", 0, 64).chunk(world)[rank]))
    model.reshard()  # the root keeps its gathered weights after a forward pass; they would outlive a change of the shards
    model.train()
    return value


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(6)
    model = LM()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    for b in model.blocks:
        fully_shard(b, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.01)
    ring = Ring(model, size=3)

    step = 0
    if args.resume:
        m, o = get_state_dict(model, optimizer)
        state = {"model": m, "optim": o, "ring": ring.state_dict(), "step": 0}
        newest = max(os.listdir(args.resume), key=int)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        ring.load_state_dict(state["ring"])
        step = state["step"]

    while step < args.steps:
        for group in optimizer.param_groups:
            group["lr"] = 6e-3 * wsd(step, args.steps)
        loss = loss_of(model, rows("train", step, 16).chunk(world)[rank])
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        shown = mean_over_ranks(loss)
        if step % 3 == 0:
            ring.push()
            with ring.mean_weights():
                averaged = evaluate(model, rank, world)
            last = evaluate(model, rank, world)
            if rank == 0:
                print(f"step {step} train {shown:.4f} valid {last:.4f} valid of the average {averaged:.4f}")
        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, optimizer)
            state = {"model": m, "optim": o, "ring": ring.state_dict(), "step": step}
            dcp.save(state, checkpoint_id=os.path.join(args.out, str(step)))

    if args.export:
        full_options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        last = {k: v.clone() for k, v in get_model_state_dict(model, options=full_options).items()}
        with ring.mean_weights():
            average = {k: v.clone() for k, v in get_model_state_dict(model, options=full_options).items()}
        if rank == 0:
            torch.save({"last": last, "average": average}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
