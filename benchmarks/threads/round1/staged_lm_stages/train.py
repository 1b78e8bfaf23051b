"""Staged language-model pretraining with FSDP2.

Training runs in stages (e.g. "warm" data mix, then "main", then "anneal").  Every
stage starts a new AdamW with its own learning rate and continues from the weights
of the stage before; with --save-stages the weights are written at the end of the
given stages so that a later job can pick the run up at the stage boundary.
"""
import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, DIM, HEADS, LAYERS = 48, 24, 32, 4, 2
STAGES = [("warm", 3e-3, 0.2), ("main", 2e-3, 0.5), ("anneal", 5e-4, 0.8)]


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.ln1 = nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.ln2 = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, HEADS, d // HEADS).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln2(x))))


class LM(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok = nn.Embedding(VOCAB, DIM)
        self.pos = nn.Embedding(SEQ, DIM)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.ln = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, ids):
        x = self.tok(ids) + self.pos(torch.arange(ids.size(1), device=ids.device))
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.ln(x))


def sample(step, mix, batch):
    """Global batch of a step: a mix of counting sequences and periodic ones."""
    g = torch.Generator().manual_seed(9000 + step)
    start = torch.randint(VOCAB, (batch, 1), generator=g)
    stride = torch.randint(1, 5, (batch, 1), generator=g)
    count = (start + stride * torch.arange(SEQ + 1)) % VOCAB
    motif = torch.randint(VOCAB, (batch, 6), generator=g)
    period = motif.repeat(1, SEQ // 6 + 1)[:, : SEQ + 1]
    pick = torch.rand(batch, 1, generator=g) < mix
    return torch.where(pick, period, count)


def save_stage(path, model, optimizer, stage, save_optim):
    state = {"model": get_model_state_dict(model)}
    if save_optim:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.save(state, checkpoint_id=os.path.join(path, f"stage_{stage}"))
    if dist.get_rank() == 0:
        with open(os.path.join(path, "run.json"), "w") as f:
            json.dump({"stage": stage, "save_optim": save_optim}, f)
    dist.barrier()


def load_stage(path, model, optimizer):
    with open(os.path.join(path, "run.json")) as f:
        run = json.load(f)
    state = {"model": get_model_state_dict(model)}
    if run["save_optim"]:
        state["optimizer"] = get_optimizer_state_dict(model, optimizer)
    dcp.load(
        state,
        checkpoint_id=os.path.join(path, f"stage_{run['stage']}"),
        planner=DefaultLoadPlanner(allow_partial_load=True),
    )
    set_model_state_dict(model, state["model"])
    if "optimizer" in state:
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    return run["stage"]


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--stage-steps", type=int, default=8)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--ckpt", default=None)
    p.add_argument("--save-stages", type=int, nargs="*", default=[], help="stages whose weights are written")
    p.add_argument("--save-optim", action="store_true", help="also keep the optimizer of the stage")
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(17)
    model = LM().to(device)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh)
    fully_shard(model, mesh=mesh)

    def new_optimizer(stage):
        return torch.optim.AdamW(model.parameters(), lr=STAGES[stage][1], betas=(0.9, 0.95), weight_decay=0.05)

    first = 0
    optimizer = new_optimizer(0)
    if args.resume:
        first = min(load_stage(args.ckpt, model, optimizer) + 1, len(STAGES) - 1)
        for group in optimizer.param_groups:
            group["lr"] = STAGES[first][1]

    per_rank = args.batch // world
    for stage in range(first, len(STAGES)):
        name, lr, mix = STAGES[stage]
        if stage > first:
            optimizer = new_optimizer(stage)
        for i in range(args.stage_steps):
            step = stage * args.stage_steps + i
            ids = sample(step, mix, args.batch)[rank * per_rank : (rank + 1) * per_rank].to(device)
            logits = model(ids[:, :-1])
            loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
            loss.backward()
            gnorm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if rank == 0:
                print(f"[{name}] step {step:3d} loss {shown.item() / world:.6f} gnorm {float(gnorm):.5f}", flush=True)
        if args.ckpt and stage in args.save_stages:
            save_stage(args.ckpt, model, optimizer, stage, args.save_optim)

    checksum = sum(p.full_tensor().double().abs().sum() for p in model.parameters())
    if rank == 0:
        print(f"final weight checksum {checksum.item():.6f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
