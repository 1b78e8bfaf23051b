"""Masked language model over protein-like strings, tensor parallel with sequence parallel regions.

Norms and residuals work on a rank's stretch of the sequence, attention heads and MLP
columns are split over tp, with an all-gather in front and a reduce-scatter behind.
FSDP2 shards all weights over dp.
"""
import logging
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

logger = logging.getLogger("plm")


@dataclass
class Config:
    letters: int = 12
    dim: int = 32
    heads: int = 4
    layers: int = 2
    length: int = 24
    batch: int = 16
    steps: int = 60
    lr: float = 1e-2
    mask_every: int = 3
    log_every: int = 12


def gather_seq(x, group):
    parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, x.contiguous(), group=group)
    return torch.cat(parts, 1)


def scatter_seq(x, group):
    x = x.contiguous().clone()
    dist.all_reduce(x, group=group)
    return x.chunk(dist.get_world_size(group), 1)[dist.get_rank(group)].contiguous()


class EnterParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return gather_seq(x, group)

    @staticmethod
    def backward(ctx, g):
        return scatter_seq(g, ctx.group), None


class LeaveParallel(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return scatter_seq(x, group)

    @staticmethod
    def backward(ctx, g):
        return gather_seq(g, ctx.group), None


class EncoderLayer(nn.Module):
    def __init__(self, cfg, tp_mesh, gen):
        super().__init__()
        self.group = tp_mesh.get_group()
        n, r = tp_mesh.size(), tp_mesh.get_local_rank()
        self.heads = cfg.heads // n
        d = cfg.dim

        def split(rows, cols, axis):
            full = torch.randn(rows, cols, generator=gen) * cols ** -0.5
            return nn.Parameter(full.chunk(n, axis)[r].clone())

        self.attn_norm, self.mlp_norm = nn.LayerNorm(d), nn.LayerNorm(d)
        self.wq, self.wk, self.wv = (split(d, d, 0) for _ in range(3))
        self.wo = split(d, d, 1)
        self.fc1, self.fc2 = split(3 * d, d, 0), split(d, 3 * d, 1)

    def attention(self, h):
        b, t, _ = h.shape
        q, k, v = (F.linear(h, w).view(b, t, self.heads, -1).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        a = F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(b, t, -1)
        return F.linear(a, self.wo)

    def forward(self, x):
        h = EnterParallel.apply(self.attn_norm(x), self.group)
        x = x + LeaveParallel.apply(self.attention(h), self.group)
        h = EnterParallel.apply(self.mlp_norm(x), self.group)
        return x + LeaveParallel.apply(F.linear(F.gelu(F.linear(h, self.fc1)), self.fc2), self.group)


class ProteinLM(nn.Module):
    def __init__(self, cfg, tp_mesh, gen):
        super().__init__()
        self.embed = nn.Embedding(cfg.letters + 1, cfg.dim)
        self.place = nn.Embedding(cfg.length, cfg.dim)
        self.layers = nn.ModuleList(EncoderLayer(cfg, tp_mesh, gen) for _ in range(cfg.layers))
        self.final_norm = nn.LayerNorm(cfg.dim)
        self.lm_head = nn.Linear(cfg.dim, cfg.letters)

    def forward(self, ids, positions):
        x = self.embed(ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(self.final_norm(x))


# modules whose weights are whole on every tp rank and see only its stretch
SEQUENCE_REGION = ("embed", "place", "attn_norm", "mlp_norm", "final_norm", "lm_head")


def reduce_sequence_region(model, group):
    """Add up over tp what each rank's stretch contributed to shared weights."""
    for name, p in model.named_parameters():
        if any(part in SEQUENCE_REGION for part in name.split(".")):
            dist.all_reduce(p.grad.to_local(), group=group)


def strings(cfg, step, seed=0):
    """Repeats of a short motif with point mutations; every third letter is masked."""
    g = torch.Generator().manual_seed(seed + step)
    motif = torch.randint(0, cfg.letters, (cfg.batch, 4), generator=g)
    seq = motif.repeat(1, cfg.length // 4)
    change = torch.rand(seq.shape, generator=g) < 0.05
    seq = torch.where(change, torch.randint(0, cfg.letters, seq.shape, generator=g), seq)
    offset = torch.randint(0, cfg.mask_every, (cfg.batch, 1), generator=g)
    masked = (torch.arange(cfg.length) + offset) % cfg.mask_every == 0
    return torch.where(masked, cfg.letters, seq), seq, masked


def main():
    cfg = Config()
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.ERROR, format="%(message)s")
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("dp", "tp"))
    dp, tp_group = mesh["dp"].size(), mesh["tp"].get_group()

    torch.manual_seed(2)
    model = ProteinLM(cfg, mesh["tp"], torch.Generator().manual_seed(2)).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["dp"])
    fully_shard(model, mesh=mesh["dp"])
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min((s + 1) / 8, (8 / (s + 1)) ** 0.5))

    n, stretch = cfg.batch // dp, cfg.length // tp
    rows = slice(mesh["dp"].get_local_rank() * n, (mesh["dp"].get_local_rank() + 1) * n)
    cols = slice(mesh["tp"].get_local_rank() * stretch, (mesh["tp"].get_local_rank() + 1) * stretch)
    positions = torch.arange(cfg.length, device=device)[cols]

    def part_of_loss(ids, target, masked):
        logits = model(ids[rows, cols].to(device), positions)
        nll = F.cross_entropy(logits.transpose(1, 2), target[rows, cols].to(device), reduction="none")
        # rows of a batch mask equally many letters
        return (nll * masked[rows, cols].to(device)).sum() / (n * cfg.length // cfg.mask_every)

    def total(loss):
        loss = loss.detach().clone()
        dist.all_reduce(loss)
        return loss.item() / dp

    for step in range(1, cfg.steps + 1):
        loss = part_of_loss(*strings(cfg, step))
        loss.backward()
        reduce_sequence_region(model, tp_group)
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % cfg.log_every == 0:
            with torch.no_grad():
                held_out = sum(total(part_of_loss(*strings(cfg, i, 70_000))) for i in range(2)) / 2
            logger.info("step %3d  loss %.5f  held out %.5f", step, total(loss), held_out)

    model.reshard()
    norm = model.layers[0].mlp_norm.weight.full_tensor().norm().item()
    logger.info("first mlp norm %.6f", norm)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
