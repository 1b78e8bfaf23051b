"""Trains projector and decoder of a captioner on top of a pretrained, frozen vision tower."""

import argparse
import json
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, CAPTION, PATCHES, PATCH_DIM = 32, 8, 6, 12


class TowerBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = nn.Linear(PATCHES, PATCHES)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        x = x + self.mix(x.transpose(1, 2)).transpose(1, 2)
        return x + self.mlp(self.norm(x))


class VisionTower(nn.Module):
    def __init__(self, dim=16, depth=2):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH_DIM, dim)
        self.blocks = nn.ModuleList(TowerBlock(dim) for _ in range(depth))

    def forward(self, patches):
        x = self.patch_embed(patches)
        for block in self.blocks:
            x = block(x)
        return x


class TextBlock(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.out = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = (z.view(b, t, self.heads, -1).transpose(1, 2) for z in self.qkv(self.norm1(x)).chunk(3, -1))
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Captioner(nn.Module):
    def __init__(self, dim=24):
        super().__init__()
        self.vision = VisionTower()
        self.projector = nn.Sequential(nn.Linear(16, dim), nn.GELU(), nn.Linear(dim, dim))
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.randn(PATCHES + CAPTION, dim) * 0.02)
        self.blocks = nn.ModuleList(TextBlock(dim) for _ in range(2))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, patches, tokens):
        x = torch.cat([self.projector(self.vision(patches)), self.embed(tokens[:, :-1])], dim=1)
        x = x + self.pos[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(x[:, PATCHES - 1 :])


def pretrained_tower():
    """Stands in for the released weights of the vision tower."""
    g = torch.Generator().manual_seed(2024)
    return {k: torch.randn(v.shape, generator=g) * 0.25 for k, v in VisionTower().state_dict().items()}


def load_pretrained(model):
    state = {f"vision.{k}": v for k, v in pretrained_tower().items()}
    set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, strict=False))


def make_pairs(n, seed):
    g = torch.Generator().manual_seed(seed)
    patches = torch.randn(n, PATCHES, PATCH_DIM, generator=g)
    teacher = torch.Generator().manual_seed(11)
    proj = torch.randn(PATCHES * PATCH_DIM, CAPTION, generator=teacher)
    score = (patches.flatten(1) @ proj) / (PATCHES * PATCH_DIM) ** 0.5
    return patches, ((score.sigmoid() * VOCAB).long()).clamp(0, VOCAB - 1)


class Engine:
    def __init__(self, model, optimizer, dcp_ignore_frozen_params=True):
        self.model, self.optimizer = model, optimizer
        self.dcp_ignore_frozen_params = dcp_ignore_frozen_params
        self.has_freeze_params = any(not p.requires_grad for p in model.parameters())

    def save_dcp(self, folder, step):
        options = StateDictOptions(cpu_offload=True, ignore_frozen_params=self.dcp_ignore_frozen_params)
        dcp.save(get_model_state_dict(self.model, options=options), checkpoint_id=str(folder / "model"))
        dcp.save(
            get_optimizer_state_dict(self.model, self.optimizer, options=options),
            checkpoint_id=str(folder / "optimizer"),
        )
        if dist.get_rank() == 0:
            (folder.parent / "latest.json").write_text(json.dumps({"folder": folder.name, "step": step}))
        dist.barrier()

    def load_dcp(self, root):
        latest = json.loads((root / "latest.json").read_text())
        folder = root / latest["folder"]
        load_options = StateDictOptions(cpu_offload=True, ignore_frozen_params=self.dcp_ignore_frozen_params)
        set_options = StateDictOptions(cpu_offload=True, strict=not self.has_freeze_params)
        model_state = get_model_state_dict(self.model, options=load_options)
        dcp.load(model_state, checkpoint_id=str(folder / "model"))
        set_model_state_dict(self.model, model_state, options=set_options)
        optim_state = get_optimizer_state_dict(self.model, self.optimizer, options=load_options)
        dcp.load(optim_state, checkpoint_id=str(folder / "optimizer"))
        set_optimizer_state_dict(self.model, self.optimizer, optim_state, options=set_options)
        return latest["step"]


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--batch-size", type=int, default=16)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--ckpt", type=Path, default=None)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    torch.manual_seed(0)

    model = Captioner().to(device)
    model.vision.requires_grad_(False)
    mesh = init_device_mesh(device.type, (world_size,))
    for block in [*model.vision.blocks, *model.blocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(model.vision, mesh=mesh)
    fully_shard(model, mesh=mesh)

    trainable = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trainable, lr=args.lr, weight_decay=0.01)
    engine = Engine(model, optimizer)
    # The tower is not in the checkpoints, it always comes from the pretrained weights.
    load_pretrained(model)
    first = engine.load_dcp(args.ckpt) if args.resume else 0
    if rank == 0 and args.resume:
        print(f"resumed at step {first}")

    patches, captions = make_pairs(args.batch_size * args.steps, seed=1)
    per_rank = args.batch_size // world_size
    for step in range(first, args.steps):
        part = slice(step * args.batch_size + rank * per_rank, step * args.batch_size + (rank + 1) * per_rank)
        x, y = patches[part].to(device), captions[part].to(device)
        loss = F.cross_entropy(model(x, y).flatten(0, 1), y.flatten())
        loss.backward()
        nn.utils.clip_grad_norm_(trainable, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean_loss = loss.detach().clone()
        dist.all_reduce(mean_loss)
        if rank == 0 and (step % 2 == 1 or step == first):
            print(f"step {step} loss {mean_loss.item() / world_size:.6f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0 and args.ckpt and not args.resume:
            engine.save_dcp(args.ckpt / f"step-{step + 1}", step + 1)

    model.eval()
    patches, captions = make_pairs(64, seed=2)
    part = slice(rank * 64 // world_size, (rank + 1) * 64 // world_size)
    with torch.no_grad():
        x, y = patches[part].to(device), captions[part].to(device)
        val = F.cross_entropy(model(x, y).flatten(0, 1), y.flatten())
    dist.all_reduce(val)
    if rank == 0:
        print(f"validation loss {val.item() / world_size:.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
