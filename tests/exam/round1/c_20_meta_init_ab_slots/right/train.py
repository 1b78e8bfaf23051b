"""Config-driven: meta-device build with name-keyed initialisation, two alternating checkpoint slots, verified export."""

import argparse
import hashlib
import json
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
    set_model_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CONFIG = json.loads("""
{
  "model": {"vocab": 36, "dim": 32, "depth": 2, "window": 8},
  "precision": {"param": "float32", "reduce": "float32"},
  "optim": {"lr": 0.008, "betas": [0.9, 0.95], "eps": 1e-4, "weight_decay": 0.02},
  "wrap": ["Cell"], "batch": 48, "seed": 2024
}
""")


class Cell(nn.Module):
    def __init__(self, d, window):
        super().__init__()
        self.norm = nn.RMSNorm(d)
        self.mix = nn.Parameter(torch.empty(window, window))
        self.ff = nn.Linear(d, d)
        self.register_buffer("mask", torch.ones(window, window).tril(), persistent=False)

    def forward(self, x):
        h = (self.mix * self.mask).softmax(1) * self.mask
        return x + F.gelu(self.ff(torch.einsum("ts,bsd->btd", h, self.norm(x))))


class Model(nn.Module):
    def __init__(self, vocab, dim, depth, window):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.cells = nn.ModuleList(Cell(dim, window) for _ in range(depth))
        self.register_buffer(
            "phase", torch.sin(torch.arange(window)[:, None] * torch.arange(1, dim + 1) * 0.1), persistent=False
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, t):
        x = self.embed(t) + self.phase
        for c in self.cells:
            x = c(x)
        return self.head(x)


def initial(name, shape, seed):
    """The start value of a parameter depends on its name and the seed only."""
    key = int.from_bytes(hashlib.sha256(f"{seed}/{name}".encode()).digest()[:6], "big")
    g = torch.Generator().manual_seed(key)
    if name.endswith("norm.weight"):
        return torch.ones(shape)
    if len(shape) == 1 or name.endswith("mix"):
        return torch.zeros(shape)
    return torch.randn(shape, generator=g) * (0.5 if "embed" in name else shape[1] ** -0.5)


def build(cfg):
    with torch.device("meta"):
        model = Model(**cfg["model"])
    dt = {k: getattr(torch, v) for k, v in cfg["precision"].items()}
    policy = MixedPrecisionPolicy(param_dtype=dt["param"], reduce_dtype=dt["reduce"])
    for m in model.modules():
        if type(m).__name__ in cfg["wrap"]:
            fully_shard(m, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    model.to_empty(device="cpu")
    full = {n: initial(n, tuple(p.shape), cfg["seed"]) for n, p in model.named_parameters()}
    set_model_state_dict(model, full, options=StateDictOptions(full_state_dict=True))
    fresh = Model(**cfg["model"])  # buffers have no entry in the state dict: take them from a real instance
    for (n, b), (m, src) in zip(model.named_buffers(), fresh.named_buffers(), strict=True):
        assert n == m
        b.copy_(src)
    return model


class Slots:
    """Slots A and B in turn; the small index file is replaced only after the slot is complete."""

    def __init__(self, folder):
        self.index = os.path.join(folder, "index.json")
        self.folder = folder

    def read(self):
        return json.load(open(self.index)) if os.path.exists(self.index) else None

    def save(self, step, state):
        current = self.read()
        slot = "B" if current and current["slot"] == "A" else "A"
        dist.barrier()  # nobody may replace the index before all have read it
        dcp.save(state, checkpoint_id=os.path.join(self.folder, slot))
        if dist.get_rank() == 0:
            with open(self.index + ".new", "w") as f:
                json.dump({"slot": slot, "step": step}, f)
            os.replace(self.index + ".new", self.index)
        dist.barrier()

    def load(self, state):
        current = self.read()
        dcp.load(state, checkpoint_id=os.path.join(self.folder, current["slot"]))
        return current["step"]


def batch(cfg, step, rank, world):
    g = torch.Generator().manual_seed(cfg["seed"] + 17 * step)
    v, w = cfg["model"]["vocab"], cfg["model"]["window"]
    start, stride = (
        torch.randint(v, (cfg["batch"], 1), generator=g),
        torch.randint(1, 4, (cfg["batch"], 1), generator=g),
    )
    t = ((start + stride * torch.arange(w + 1)) % v)[rank::world]
    return t[:, :-1], t[:, 1:]


def main():
    ap = argparse.ArgumentParser()
    for name in ("--save-every", "--steps"):
        ap.add_argument(name, type=int, default=30)
    for name in ("--out", "--resume", "--export"):
        ap.add_argument(name)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    cfg = CONFIG
    model = build(cfg)
    o = cfg["optim"]
    opt = torch.optim.AdamW(
        model.parameters(), lr=o["lr"], betas=tuple(o["betas"]), eps=o["eps"], weight_decay=o["weight_decay"]
    )

    def state():
        m, s = get_state_dict(model, opt)
        return {"model": m, "opt": s}

    step = 0
    if args.resume:
        s = state()
        step = Slots(args.resume).load(s)
        set_state_dict(model, opt, model_state_dict=s["model"], optim_state_dict=s["opt"])
    if args.out:
        os.makedirs(args.out, exist_ok=True)
    slots = Slots(args.out) if args.out else None

    while step < args.steps:
        x, y = batch(cfg, step, rank, world)
        loss = F.cross_entropy(model(x).flatten(0, 1).float(), y.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        if slots and step % args.save_every == 0:
            slots.save(step, state())
        dist.all_reduce(shown := loss.detach() / world)
        if rank == 0:
            print(f"step {step} loss {shown.item():.4f}", flush=True)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    x, _ = batch(cfg, 10_000, 0, 1)
    with torch.no_grad():
        sharded_logits = model(x)
    if rank == 0:
        plain = Model(**cfg["model"])
        plain.load_state_dict(full)
        with torch.no_grad():
            print(f"export check: largest difference of logits {(plain(x) - sharded_logits).abs().max().item():.2e}")
        if args.export:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
