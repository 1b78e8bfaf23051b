"""Train a small ViT with native aspect ratios on synthetic textures.

Every batch holds images of one (height, width); the number of images in it
follows from a token budget, so that small images come in larger batches.
The loader hands out flattened patches plus their (y, x) grid coordinates.
"""
import argparse
import logging
import math
import time
from contextlib import contextmanager

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

_logger = logging.getLogger("train")

parser = argparse.ArgumentParser()
parser.add_argument("--updates", type=int, default=36)
parser.add_argument("--token-budget", type=int, default=384)
parser.add_argument("--lr", type=float, default=2e-3)
parser.add_argument("--opt-eps", type=float, default=1e-5)
parser.add_argument("--warmup", type=int, default=4)
parser.add_argument("--weight-decay", type=float, default=0.05)
parser.add_argument("--smoothing", type=float, default=0.1)
parser.add_argument("--patch-size", type=int, default=2)
parser.add_argument("--dim", type=int, default=32)
parser.add_argument("--depth", type=int, default=3)
parser.add_argument("--num-classes", type=int, default=6)
parser.add_argument("--log-interval", type=int, default=6)
parser.add_argument("--seed", type=int, default=42)

IMAGE_SIZES = ((8, 8), (8, 12), (12, 12), (12, 8))


class PatchEmbed(nn.Module):
    """Linear patch embedding; kernels are resampled for other patch sizes."""

    def __init__(self, patch_size, in_chans, dim):
        super().__init__()
        self.patch_size = (patch_size, patch_size)
        self.in_chans = in_chans
        self.proj = nn.Linear(in_chans * patch_size * patch_size, dim)
        self.y_embed = nn.Parameter(torch.randn(16, dim) * 0.02)
        self.x_embed = nn.Parameter(torch.randn(16, dim) * 0.02)

    def forward(self, patches, coord):
        weight = self.proj.weight
        if patches.shape[-1] != weight.shape[-1]:
            side = math.isqrt(patches.shape[-1] // self.in_chans)
            kernel = weight.view(-1, self.in_chans, *self.patch_size)
            kernel = F.interpolate(kernel, size=(side, side), mode="bilinear", antialias=True)
            weight = kernel.flatten(1) * (self.patch_size[0] / side) ** 2
        x = F.linear(patches, weight, self.proj.bias)
        return x + self.y_embed[coord[..., 0]] + self.x_embed[coord[..., 1]]


class Block(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.norm1 = nn.LayerNorm(dim)
        self.qkv = nn.Linear(dim, 3 * dim)
        self.proj = nn.Linear(dim, dim)
        self.norm2 = nn.LayerNorm(dim)
        self.fc1 = nn.Linear(dim, 2 * dim)
        self.fc2 = nn.Linear(2 * dim, dim)

    def forward(self, x):
        b, n, c = x.shape
        qkv = self.qkv(self.norm1(x)).view(b, n, 3, self.heads, c // self.heads)
        q, k, v = qkv.permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, n, c))
        return x + self.fc2(F.gelu(self.fc1(self.norm2(x))))


class NaFlexVit(nn.Module):
    def __init__(self, patch_size, dim, depth, num_classes, in_chans=3):
        super().__init__()
        self.embeds = PatchEmbed(patch_size, in_chans, dim)
        self.blocks = nn.ModuleList([Block(dim) for _ in range(depth)])
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, num_classes)

    def forward(self, batch):
        x = self.embeds(batch["patches"], batch["patch_coord"])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).mean(dim=1))


class ShardedDataParallel(nn.Module):
    """fully_shard behind the interface of DistributedDataParallel."""

    def __init__(self, module, mesh):
        super().__init__()
        for block in module.blocks:
            fully_shard(block, mesh=mesh)
        self.module = fully_shard(module, mesh=mesh)

    def forward(self, *args, **kwargs):
        return self.module(*args, **kwargs)

    @contextmanager
    def no_sync(self):
        self.module.set_requires_gradient_sync(False)
        yield
        self.module.set_requires_gradient_sync(True)


class TextureImages:
    """Oriented gratings in noise; orientation and frequency make the class."""

    def __init__(self, num_classes, seed):
        self.num_classes = num_classes
        self.seed = seed

    def get(self, index, size):
        g = torch.Generator().manual_seed(self.seed * 1_000_003 + index)
        target = int(torch.randint(self.num_classes, (1,), generator=g))
        angle = math.pi * (target % 3) / 3
        freq = 1.2 if target < 3 else 2.4
        y, x = torch.meshgrid(torch.arange(size[0]), torch.arange(size[1]), indexing="ij")
        phase = 2 * math.pi * torch.rand((), generator=g)
        wave = torch.sin(freq * (y * math.sin(angle) + x * math.cos(angle)) + phase)
        tint = 0.5 + torch.rand(3, 1, 1, generator=g)
        image = tint * wave + 0.3 * torch.randn(3, *size, generator=g)
        return image, target


def patchify(image, patch_size):
    c, h, w = image.shape
    ph, pw = patch_size
    x = image.view(c, h // ph, ph, w // pw, pw).permute(1, 3, 0, 2, 4)
    grid = torch.meshgrid(torch.arange(h // ph), torch.arange(w // pw), indexing="ij")
    return x.reshape(-1, c * ph * pw), torch.stack(grid, dim=-1).view(-1, 2)


class NaFlexLoader:
    def __init__(self, dataset, patch_size, token_budget, num_batches, rank, world_size, seed, start=0):
        self.dataset = dataset
        self.patch_size = patch_size
        self.rank, self.world_size = rank, world_size
        g = torch.Generator().manual_seed(seed)
        self.plan = []
        for _ in range(num_batches):
            size = IMAGE_SIZES[int(torch.randint(len(IMAGE_SIZES), (1,), generator=g))]
            seq_len = (size[0] // patch_size[0]) * (size[1] // patch_size[1])
            global_batch = max(8, token_budget // seq_len // 8 * 8)
            self.plan.append((size, start, global_batch))
            start += global_batch

    def __len__(self):
        return len(self.plan)

    def __iter__(self):
        for size, start, global_batch in self.plan:
            samples = []
            for i in range(start + self.rank, start + global_batch, self.world_size):
                image, target = self.dataset.get(i, size)
                samples.append((*patchify(image, self.patch_size), target))
            patches, coord, target = zip(*samples)
            yield {"patches": torch.stack(patches), "patch_coord": torch.stack(coord)}, torch.tensor(target)


def reduce_sum(*values):
    t = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(t)
    return t.tolist()


@torch.no_grad()
def validate(model, loader):
    model.eval()
    correct = loss = count = 0.0
    for batch, target in loader:
        output = model(batch)
        loss += F.cross_entropy(output, target, reduction="sum").item()
        correct += (output.argmax(-1) == target).sum().item()
        count += target.numel()
    model.train()
    loss, correct, count = reduce_sum(loss, correct, count)
    return loss / count, 100.0 * correct / count


def main():
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    dist.init_process_group("gloo")
    rank, world_size = dist.get_rank(), dist.get_world_size()
    distributed = world_size > 1
    primary = rank == 0
    torch.manual_seed(args.seed)

    model = NaFlexVit(args.patch_size, args.dim, args.depth, args.num_classes)
    if primary:
        _logger.info(f"Model created, params: {sum(p.numel() for p in model.parameters())}")

    patch_size = getattr(getattr(model, "embeds", None), "patch_size", None)
    if distributed:
        model = ShardedDataParallel(model, init_device_mesh("cpu", (world_size,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, eps=args.opt_eps,
                                  weight_decay=args.weight_decay)

    if patch_size is None:
        patch_size = (4, 4)
    loader_args = dict(patch_size=patch_size, token_budget=args.token_budget, rank=rank, world_size=world_size)
    dataset = TextureImages(args.num_classes, args.seed)
    loader_train = NaFlexLoader(dataset, num_batches=args.updates, seed=args.seed, **loader_args)
    loader_eval = NaFlexLoader(dataset, num_batches=8, seed=args.seed + 1, start=100_000, **loader_args)

    for update, (batch, target) in enumerate(loader_train):
        t0 = time.time()
        warm = min(1.0, (update + 1) / args.warmup)
        lr = args.lr * warm * 0.5 * (1 + math.cos(math.pi * update / args.updates))
        for group in optimizer.param_groups:
            group["lr"] = lr
        output = model(batch)
        loss = F.cross_entropy(output, target, label_smoothing=args.smoothing)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

        if update % args.log_interval == 0 or update == len(loader_train) - 1:
            loss_sum, n = reduce_sum(loss.item() * target.numel(), target.numel())
            if primary:
                _logger.info(f"Train: [{update:>3d}/{len(loader_train)}]  Loss: {loss_sum / n:.6f}  "
                             f"LR: {lr:.3e}  {n / (time.time() - t0):.0f} img/s")

    val_loss, top1 = validate(model, loader_eval)
    if primary:
        _logger.info(f"Eval: loss {val_loss:.6f}  top1 {top1:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
