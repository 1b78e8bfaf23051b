"""Per-position signal tracks from nucleotide sequences.

Mesh (cp, tp): the sequence is split over cp, attention heads and MLP columns over tp.
FSDP2 shards the weights over cp and averages their gradients there. Queries and keys are
normalised per head with weights that all heads share.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

LENGTH, BATCH, TRACKS = 32, 8, 3
DIM, HEADS, HEAD_DIM, LAYERS = 32, 4, 8, 2
STEPS, WARMUP, LR = 48, 6, 6e-3


class Replicated(torch.autograd.Function):
    """Input of column-split layers: gradients of all tp ranks add up."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        return x.view_as(x)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g, None


class Summed(torch.autograd.Function):
    """Output of row-split layers."""

    @staticmethod
    def forward(ctx, x, group):
        x = x.contiguous().clone()
        dist.all_reduce(x, group=group)
        return x

    @staticmethod
    def backward(ctx, g):
        return g, None


class WholeSequence(torch.autograd.Function):
    """Keys or values of all cp ranks, in order."""

    @staticmethod
    def forward(ctx, x, group):
        ctx.group = group
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size(group))]
        dist.all_gather(parts, x, group=group)
        return torch.cat(parts, 2)

    @staticmethod
    def backward(ctx, g):
        g = g.contiguous().clone()
        dist.all_reduce(g, group=ctx.group)
        return g.chunk(dist.get_world_size(ctx.group), 2)[dist.get_rank(ctx.group)], None


def cut(mesh, full, axis):
    return nn.Parameter(full.chunk(mesh.size(), axis)[mesh.get_local_rank()].clone())


class Attention(nn.Module):
    def __init__(self, mesh, gen):
        super().__init__()
        self.tp, self.cp = mesh["tp"].get_group(), mesh["cp"].get_group()
        self.heads = HEADS // mesh["tp"].size()
        draw = lambda: torch.randn(DIM, DIM, generator=gen) * DIM ** -0.5
        self.wq, self.wk, self.wv = (cut(mesh["tp"], draw(), 0) for _ in range(3))
        self.wo = cut(mesh["tp"], draw(), 1)
        self.q_norm, self.k_norm = nn.LayerNorm(HEAD_DIM), nn.LayerNorm(HEAD_DIM)

    def split_heads(self, x, w):
        return F.linear(x, w).unflatten(-1, (self.heads, HEAD_DIM)).transpose(1, 2)

    def forward(self, x):
        x = Replicated.apply(x, self.tp)
        q = self.q_norm(self.split_heads(x, self.wq))
        k = self.k_norm(self.split_heads(x, self.wk))
        v = self.split_heads(x, self.wv)
        k = WholeSequence.apply(k.contiguous(), self.cp)
        v = WholeSequence.apply(v.contiguous(), self.cp)
        a = F.scaled_dot_product_attention(q, k, v)
        return Summed.apply(F.linear(a.transpose(1, 2).flatten(2), self.wo), self.tp)


class Layer(nn.Module):
    def __init__(self, mesh, gen):
        super().__init__()
        self.tp = mesh["tp"].get_group()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.attn = Attention(mesh, gen)
        self.w1 = cut(mesh["tp"], torch.randn(3 * DIM, DIM, generator=gen) * DIM ** -0.5, 0)
        self.w2 = cut(mesh["tp"], torch.randn(DIM, 3 * DIM, generator=gen) * (3 * DIM) ** -0.5, 1)

    def forward(self, x):
        x = x + self.attn(self.norm1(x))
        h = Replicated.apply(self.norm2(x), self.tp)
        return x + Summed.apply(F.linear(F.gelu(F.linear(h, self.w1)), self.w2), self.tp)


class TrackModel(nn.Module):
    def __init__(self, mesh, gen):
        super().__init__()
        self.base = nn.Embedding(4, DIM)
        self.place = nn.Embedding(LENGTH, DIM)
        self.layers = nn.ModuleList(Layer(mesh, gen) for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.tracks = nn.Linear(DIM, TRACKS)

    def forward(self, ids, positions):
        x = self.base(ids) + self.place(positions)
        for layer in self.layers:
            x = layer(x)
        return self.tracks(self.norm(x))


def sequences(index):
    """Tracks: local GC content, similarity to the mirrored position, distance-weighted A content."""
    g = torch.Generator().manual_seed(616 + index)
    ids = torch.randint(0, 4, (BATCH, LENGTH), generator=g)
    gc = ((ids == 1) | (ids == 2)).float()
    smooth = F.avg_pool1d(gc.unsqueeze(1), 5, 1, 2, count_include_pad=False).squeeze(1)
    mirror = (ids == ids.flip(1)).float()
    distance = (torch.arange(LENGTH).view(-1, 1) - torch.arange(LENGTH)).abs().float()
    kernel = torch.softmax(-distance / 3, -1)
    near = (ids == 0).float() @ kernel.t()
    return ids, torch.stack([smooth, mirror, 2 * near], -1)


def finish_norm_grads(model, group):
    """The shared query and key norms see only a part of the heads on each rank."""
    for name, p in model.named_parameters():
        if ".q_norm." in name or ".k_norm." in name:
            dist.all_reduce(p.grad.to_local(), group=group)


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    tp = 2 if world % 2 == 0 else 1
    mesh = init_device_mesh(device.type, (world // tp, tp), mesh_dim_names=("cp", "tp"))
    norm_group = mesh["tp"].get_group()

    torch.manual_seed(61)
    model = TrackModel(mesh, torch.Generator().manual_seed(62)).to(device)
    for layer in model.layers:
        fully_shard(layer, mesh=mesh["cp"])
    fully_shard(model, mesh=mesh["cp"])
    opt = torch.optim.SGD(model.parameters(), lr=LR * 10, momentum=0.9, nesterov=True)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: min(1.0, (s + 1) / WARMUP))

    part = LENGTH // mesh["cp"].size()
    cols = slice(mesh["cp"].get_local_rank() * part, (mesh["cp"].get_local_rank() + 1) * part)
    positions = torch.arange(LENGTH, device=device)[cols]

    def loss_on(index):
        ids, target = (t[:, cols].to(device) for t in sequences(index))
        return F.mse_loss(model(ids, positions), target)

    def overall(value):
        value = value.detach().clone()
        dist.all_reduce(value)
        return value.item() / world

    for step in range(STEPS):
        loss = loss_on(step)
        loss.backward()
        finish_norm_grads(model, norm_group)
        opt.step()
        opt.zero_grad()
        sched.step()
        if step % 8 == 7:
            with torch.no_grad():
                valid = overall(loss_on(90_000) + loss_on(90_001)) / 2
            train = overall(loss)
            if rank == 0:
                print(f"{step + 1:4d} train {train:.6f} valid {valid:.6f}", flush=True)

    model.reshard()
    scale = model.layers[0].attn.q_norm.weight.full_tensor()
    if rank == 0:
        print(f"query norm scale {scale.norm().item():.6f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
