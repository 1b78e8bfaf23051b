"""Self-distillation (DINO) pretraining of a tiny ViT on synthetic textures."""
import argparse
import copy
import math
import os
import time

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

N_CLASSES, N_PATCHES, PATCH_DIM = 6, 16, 12


def get_args():
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=40)
    p.add_argument("--batch-size", type=int, default=32, help="global batch size")
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--weight-decay", type=float, default=0.04)
    p.add_argument("--clip-grad", type=float, default=1.0)
    p.add_argument("--warmup", type=int, default=5)
    p.add_argument("--freeze-last-layer", type=int, default=4)
    p.add_argument("--momentum-teacher", type=float, default=0.97)
    p.add_argument("--dim", type=int, default=24)
    p.add_argument("--depth", type=int, default=2)
    p.add_argument("--prototypes", type=int, default=32)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


class Textures:
    """Every image is addressed by a global index, so the stream does not depend on the number of ranks."""

    def __init__(self, seed):
        self.seed = seed
        g = torch.Generator().manual_seed(seed)
        self.prototypes = torch.randn(N_CLASSES, N_PATCHES, PATCH_DIM, generator=g)

    def image(self, index, g=None):
        g = g or torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        label = index % N_CLASSES
        return self.prototypes[label] + 0.6 * torch.randn(N_PATCHES, PATCH_DIM, generator=g), label

    def crops(self, index):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        img, _ = self.image(index, g)
        global_crops = [img + 0.2 * torch.randn(img.shape, generator=g) for _ in range(2)]
        local_crops = []
        for _ in range(2):
            keep = torch.rand(N_PATCHES, 1, generator=g) < 0.4
            local_crops.append(img * keep)
        return global_crops, local_crops

    def batch(self, step, batch_size, rank, world):
        first = step * batch_size
        mine = range(first + rank, first + batch_size, world)
        views = [self.crops(i) for i in mine]
        g = [torch.stack([v[0][c] for v in views]) for c in range(2)]
        l = [torch.stack([v[1][c] for v in views]) for c in range(2)]
        return g, l


class Block(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        B, N, C = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(B, N, 3, self.heads, C // self.heads).permute(2, 0, 3, 1, 4)
        x = x + self.proj(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(B, N, C))
        return x + self.mlp(self.norm2(x))


class ViT(nn.Module):
    def __init__(self, dim, depth):
        super().__init__()
        self.patch_embed = nn.Linear(PATCH_DIM, dim)
        self.cls_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.pos_embed = nn.Parameter(0.02 * torch.randn(1, N_PATCHES + 1, dim))
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)

    def forward(self, x):
        x = self.patch_embed(x)
        x = torch.cat([self.cls_token.expand(len(x), -1, -1), x], dim=1) + self.pos_embed
        for blk in self.blocks:
            x = blk(x)
        return self.norm(x[:, 0])


class DINOHead(nn.Module):
    def __init__(self, dim, prototypes, bottleneck=16):
        super().__init__()
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, bottleneck))
        self.last_layer = nn.Linear(bottleneck, prototypes, bias=False)

    def forward(self, x):
        return self.last_layer(F.normalize(self.mlp(x), dim=-1))


class DINOLoss:
    def __init__(self, prototypes, student_temp=0.1, teacher_temp=0.05, momentum=0.9):
        self.center = torch.zeros(1, prototypes)
        self.student_temp, self.teacher_temp, self.momentum = student_temp, teacher_temp, momentum

    @torch.no_grad()
    def targets(self, teacher_out):
        out = [F.softmax((t - self.center) / self.teacher_temp, dim=-1) for t in teacher_out]
        mean = torch.cat(teacher_out).mean(0, keepdim=True)
        dist.all_reduce(mean)
        self.center.lerp_(mean / dist.get_world_size(), 1 - self.momentum)
        return out

    def __call__(self, student_out, targets):
        total, terms = 0.0, 0
        for it, t in enumerate(targets):
            for iv, s in enumerate(student_out):
                if iv == it:
                    continue
                total = total - (t * F.log_softmax(s / self.student_temp, dim=-1)).sum(-1).mean()
                terms += 1
        return total / terms


def shard_module(module, mesh):
    fully_shard(module, mesh=mesh, reshard_after_forward=True)
    if mesh.device_type == "cpu":
        module.set_force_sum_reduction_for_comms(True)  # gloo has no average


def parallelize(arch, mesh):
    for name, module in arch.items():
        if name == "backbone":
            for blk in module.blocks:
                shard_module(blk, mesh)
            for prev, nxt in zip(module.blocks, module.blocks[1:]):
                prev.set_modules_to_forward_prefetch([nxt])
                nxt.set_modules_to_backward_prefetch([prev])
        shard_module(module, mesh)
    return arch


def param_groups(student, weight_decay):
    decay, no_decay, last = [], [], []
    for name, p in student.named_parameters():
        if "last_layer" in name:
            last.append(p)
        elif p.ndim <= 1 or "token" in name or "pos_embed" in name:
            no_decay.append(p)
        else:
            decay.append(p)
    return [
        {"params": decay, "weight_decay": weight_decay, "is_last_layer": False},
        {"params": no_decay, "weight_decay": 0.0, "is_last_layer": False},
        {"params": last, "weight_decay": weight_decay, "is_last_layer": True},
    ]


@torch.no_grad()
def update_teacher(student, teacher, m):
    for ps, pt in zip(student.parameters(), teacher.parameters()):
        pt.mul_(m).add_(ps, alpha=1 - m)


@torch.no_grad()
def knn_accuracy(backbone, data, n_train=96, n_test=96, k=5, offset=10_000_000):
    def features(start, n):
        items = [data.image(start + i) for i in range(n)]
        feats = F.normalize(backbone(torch.stack([im for im, _ in items])), dim=-1)
        return feats, torch.tensor([lab for _, lab in items])

    xtr, ytr = features(offset, n_train)
    xte, yte = features(offset + n_train, n_test)
    votes = F.one_hot(ytr[(xte @ xtr.T).topk(k, dim=1).indices], N_CLASSES).sum(1)
    return (votes.argmax(1) == yte).float().mean().item()


def main():
    args = get_args()
    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device_type = "cpu"
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        torch.set_default_device("cuda")
        device_type = "cuda"
    mesh = init_device_mesh(device_type, (world,))

    torch.manual_seed(args.seed)
    student = nn.ModuleDict({"backbone": ViT(args.dim, args.depth), "dino_head": DINOHead(args.dim, args.prototypes)})
    teacher = copy.deepcopy(student).requires_grad_(False).eval()
    parallelize(student, mesh)
    parallelize(teacher, mesh)

    data = Textures(args.seed)
    loss_fn = DINOLoss(args.prototypes)
    optimizer = torch.optim.AdamW(param_groups(student, args.weight_decay), lr=args.lr, betas=(0.9, 0.99))

    start = time.time()
    for step in range(args.steps):
        if step < args.warmup:
            lr = args.lr * (step + 1) / args.warmup
        else:
            t = (step - args.warmup) / max(1, args.steps - args.warmup)
            lr = args.lr * (0.05 + 0.95 * 0.5 * (1 + math.cos(math.pi * t)))
        for group in optimizer.param_groups:
            group["lr"] = 0.0 if group["is_last_layer"] and step < args.freeze_last_layer else lr

        global_crops, local_crops = data.batch(step, args.batch_size, rank, world)
        n_views = len(global_crops) + len(local_crops)
        with torch.no_grad():
            teacher_out = teacher["dino_head"](teacher["backbone"](torch.cat(global_crops)))
            targets = loss_fn.targets(list(teacher_out.chunk(2)))
        student_out = student["dino_head"](student["backbone"](torch.cat(global_crops + local_crops)))
        loss = loss_fn(list(student_out.chunk(n_views)), targets)

        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        norms = {}
        for name, module in student.items():
            norms[name] = nn.utils.clip_grad_norm_(module.parameters(), args.clip_grad).full_tensor().item()
        optimizer.step()

        m = 1 - (1 - args.momentum_teacher) * (math.cos(math.pi * step / args.steps) + 1) / 2
        update_teacher(student, teacher, m)

        reduced = loss.detach().clone()
        dist.all_reduce(reduced)
        if rank == 0 and (step % 5 == 0 or step == args.steps - 1):
            print(
                f"step {step:3d} loss {reduced.item() / world:.6f} lr {lr:.2e} mom {m:.4f} "
                + " ".join(f"gnorm/{k} {v:.5f}" for k, v in norms.items()),
                flush=True,
            )

    acc = knn_accuracy(teacher["backbone"], data)
    checksum = sum(p.full_tensor().double().abs().sum() for p in student.parameters()).item()
    if rank == 0:
        print(f"teacher knn {acc:.4f} |w| {checksum:.6f} time {time.time() - start:.1f}s", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
