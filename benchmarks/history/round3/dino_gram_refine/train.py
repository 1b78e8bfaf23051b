"""Masked-feature pretraining of a small ViT with an EMA teacher, followed by a refinement
phase in which patch similarities are anchored to an earlier snapshot (gram loss)."""
import copy
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

SEED = 11
STEPS = 36
SNAPSHOT_STEP = 12
GRAM_START = 18
GRAM_WEIGHT = 2.0
BATCH = 16
SIDE, PATCH_DIM, DIM, HEADS, DEPTH = 4, 10, 24, 2, 2
LR, WD, EMA = 2e-3, 0.02, 0.95


class MaskedBiasLinear(nn.Linear):
    """qkv projection whose key part carries no bias."""

    def __init__(self, dim):
        super().__init__(dim, 3 * dim)
        mask = torch.ones(3 * dim)
        mask[dim : 2 * dim] = 0
        self.register_buffer("bias_mask", mask)

    def forward(self, x):
        return F.linear(x, self.weight, self.bias * self.bias_mask)


class Attention(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.qkv = MaskedBiasLinear(dim)
        self.proj = nn.Linear(dim, dim)

    def forward(self, x, rope):
        b, n, c = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, HEADS, c // HEADS).permute(2, 0, 3, 1, 4)
        cos, sin = rope
        q, k = rotate(q, cos, sin), rotate(k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v)
        return self.proj(out.transpose(1, 2).reshape(b, n, c))


def rotate(x, cos, sin):
    a, b = x.chunk(2, dim=-1)
    return torch.cat([a * cos - b * sin, a * sin + b * cos], dim=-1)


class Block(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = Attention(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, rope):
        x = x + self.attn(self.norm1(x), rope)
        return x + self.mlp(self.norm2(x))


class Backbone(nn.Module):
    def __init__(self):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH_DIM, DIM)
        self.mask_token = nn.Parameter(torch.zeros(DIM))
        half = DIM // HEADS // 2
        self.register_buffer("rope_periods", 20.0 ** (torch.arange(half) / half))
        self.blocks = nn.ModuleList(Block(DIM) for _ in range(DEPTH))
        self.norm = nn.LayerNorm(DIM)

    def forward(self, patches, mask=None):
        x = self.patch_embed(patches)
        if mask is not None:
            x = torch.where(mask[..., None], self.mask_token, x)
        angle = torch.arange(SIDE * SIDE, device=x.device)[:, None] / self.rope_periods
        rope = angle.cos(), angle.sin()
        for blk in self.blocks:
            x = blk(x, rope)
        return self.norm(x)


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = Backbone()
        self.ibot_head = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM))

    def forward(self, patches, mask=None):
        feats = self.backbone(patches, mask)
        return feats, self.ibot_head(feats)


def shard(model, mesh):
    for blk in model.backbone.blocks:
        fully_shard(blk, mesh=mesh)
    return fully_shard(model, mesh=mesh, reshard_after_forward=True)


def load_full_state(model, state, mesh, skip_load_keys=(), keys_not_sharded=()):
    """Put a full (unsharded) state dict into a sharded model."""
    chkpt = {
        key: tensor
        if any(name in key for name in keys_not_sharded)
        else distribute_tensor(tensor, mesh, src_data_rank=None)
        for key, tensor in state.items()
    }
    chkpt = {key: tensor for key, tensor in chkpt.items() if not any(name in key for name in skip_load_keys)}
    return model.load_state_dict(chkpt, strict=not skip_load_keys)


def gram_loss(student, anchor):
    student, anchor = F.normalize(student, dim=-1), F.normalize(anchor, dim=-1)
    return F.mse_loss(student @ student.transpose(1, 2), anchor @ anchor.transpose(1, 2))


class Scenes:
    """Two textures per image, split along a random line of the patch grid."""

    def __init__(self):
        g = torch.Generator().manual_seed(SEED)
        self.textures = torch.randn(5, PATCH_DIM, generator=g)

    def sample(self, index):
        g = torch.Generator().manual_seed(SEED * 7919 + index)
        a, b = torch.randperm(5, generator=g)[:2]
        cut = int(torch.randint(1, SIDE, (1,), generator=g))
        cols = torch.arange(SIDE * SIDE) % SIDE
        base = torch.where((cols < cut)[:, None], self.textures[a], self.textures[b])
        patches = base + 0.3 * torch.randn(base.shape, generator=g)
        mask = torch.rand(SIDE * SIDE, generator=g).argsort() < 6
        return patches, mask

    def batch(self, step, rank, world):
        items = [self.sample(step * BATCH + i) for i in range(rank, BATCH, world)]
        return torch.stack([p for p, _ in items]), torch.stack([m for _, m in items])


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    mesh = init_device_mesh(device.type, (world,))

    torch.manual_seed(SEED)
    student = Encoder().to(device)
    teacher = copy.deepcopy(student).requires_grad_(False)
    gram_teacher = copy.deepcopy(student).requires_grad_(False)
    for model in (student, teacher, gram_teacher):
        shard(model, mesh)
    optimizer = torch.optim.AdamW(student.parameters(), lr=LR, weight_decay=WD)

    data = Scenes()
    snapshot, gram_ready = None, False
    for step in range(STEPS):
        if step == SNAPSHOT_STEP:
            full = get_model_state_dict(teacher, options=StateDictOptions(full_state_dict=True))
            snapshot = {key: tensor.clone() for key, tensor in full.items()}
        if step >= GRAM_START and not gram_ready:
            load_full_state(
                gram_teacher,
                snapshot,
                mesh,
                skip_load_keys=["ibot_head"],
                keys_not_sharded=["backbone.rope_periods", "qkv.bias_mask"],
            )
            gram_ready = True

        patches, mask = (t.to(device) for t in data.batch(step, rank, world))
        with torch.no_grad():
            _, target = teacher(patches)
            target = F.layer_norm(target, (DIM,))
        feats, pred = student(patches, mask)
        ibot = F.smooth_l1_loss(pred[mask], target[mask])
        gram = torch.zeros((), device=device)
        if gram_ready:
            with torch.no_grad():
                anchor, _ = gram_teacher(patches)
            gram = gram_loss(feats, anchor)
        loss = ibot + GRAM_WEIGHT * gram
        loss.backward()
        nn.utils.clip_grad_norm_(student.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for pt, ps in zip(teacher.parameters(), student.parameters()):
                pt.lerp_(ps, 1 - EMA)

        stats = torch.stack([loss.detach(), ibot.detach(), gram.detach()])
        dist.all_reduce(stats)
        if rank == 0 and (step % 4 == 0 or step == STEPS - 1):
            total, i, g = (stats / world).tolist()
            print(f"it {step:3d} loss {total:.6f} ibot {i:.6f} gram {g:.6f}", flush=True)

    weight = sum(p.full_tensor().double().abs().sum() for p in student.parameters()).item()
    if rank == 0:
        print(f"done, |w| {weight:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
