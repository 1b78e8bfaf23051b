"""Contrastive image-text training, epoch based, with a validation pass after each epoch."""
import argparse
import logging
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_CLASSES, IMAGE_SIZE, PATCH, VOCAB, CONTEXT = 24, 12, 4, 48, 8


def is_master(args):
    return args.rank == 0


def init_distributed_device(args):
    use_cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if use_cuda else "gloo")
    args.rank, args.world_size = dist.get_rank(), dist.get_world_size()
    if use_cuda:
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")


class ResidualAttentionBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.ln_1 = nn.LayerNorm(width)
        self.attn = nn.MultiheadAttention(width, heads, batch_first=True)
        self.ln_2 = nn.LayerNorm(width)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        h = self.ln_1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln_2(x))


class VisionTower(nn.Module):
    def __init__(self, width, embed_dim):
        super().__init__()
        self.conv1 = nn.Conv2d(3, width, PATCH, stride=PATCH, bias=False)
        self.pos = nn.Parameter(0.02 * torch.randn((IMAGE_SIZE // PATCH) ** 2, width))
        self.block = ResidualAttentionBlock(width, 2)
        self.ln_post = nn.LayerNorm(width)
        self.proj = nn.Linear(width, embed_dim, bias=False)

    def forward(self, image):
        x = self.conv1(image).flatten(2).transpose(1, 2) + self.pos
        return self.proj(self.ln_post(self.block(x)).mean(1))


class TextTower(nn.Module):
    def __init__(self, width, embed_dim):
        super().__init__()
        self.token_embedding = nn.Embedding(VOCAB, width)
        self.pos = nn.Parameter(0.02 * torch.randn(CONTEXT, width))
        self.block = ResidualAttentionBlock(width, 2)
        self.ln_final = nn.LayerNorm(width)
        self.proj = nn.Linear(width, embed_dim, bias=False)

    def forward(self, text):
        x = self.token_embedding(text) + self.pos
        return self.proj(self.ln_final(self.block(x)).mean(1))


class DualEncoder(nn.Module):
    def __init__(self, width=32, embed_dim=24):
        super().__init__()
        self.visual = VisionTower(width, embed_dim)
        self.text = TextTower(width, embed_dim)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(1 / 0.07)))

    def forward(self, image, text):
        image_features = F.normalize(self.visual(image), dim=-1)
        text_features = F.normalize(self.text(text), dim=-1)
        return image_features, text_features, self.logit_scale.exp()


class GatherFeatures(torch.autograd.Function):
    """Concatenates the features of all ranks; gradients go back to the rank they belong to."""

    @staticmethod
    def forward(ctx, x):
        parts = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x.contiguous())
        return torch.cat(parts)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def clip_loss(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    labels = torch.arange(len(logits), device=logits.device)
    return (F.cross_entropy(logits, labels) + F.cross_entropy(logits.T, labels)) / 2


class PairDataset:
    """Noisy images of a class template, captioned with the words of the class."""

    def __init__(self, size, seed, noise=0.6):
        world = torch.Generator().manual_seed(0)
        templates = torch.randn(NUM_CLASSES, 3, IMAGE_SIZE, IMAGE_SIZE, generator=world)
        captions = torch.randint(1, VOCAB, (NUM_CLASSES, CONTEXT), generator=world)
        g = torch.Generator().manual_seed(seed)
        labels = torch.randint(0, NUM_CLASSES, (size,), generator=g)
        self.images = templates[labels] + noise * torch.randn(size, 3, IMAGE_SIZE, IMAGE_SIZE, generator=g)
        texts = captions[labels]
        drop = torch.rand(size, CONTEXT, generator=g) < 0.15
        self.texts = texts.masked_fill(drop, 0)

    def __len__(self):
        return len(self.images)


class Loader:
    def __init__(self, dataset, batch_size, rank=0, world_size=1, shuffle=False):
        self.dataset, self.batch_size, self.shuffle = dataset, batch_size, shuffle
        self.rank, self.world_size = rank, world_size
        self.num_samples = len(dataset)
        self.num_batches = len(dataset) // batch_size

    def epoch(self, epoch):
        order = torch.arange(self.num_samples)
        if self.shuffle:
            order = torch.randperm(self.num_samples, generator=torch.Generator().manual_seed(epoch))
        for rows in order[: self.num_batches * self.batch_size].split(self.batch_size):
            rows = rows.chunk(self.world_size)[self.rank]
            yield self.dataset.images[rows], self.dataset.texts[rows]


def train_one_epoch(model, loader, epoch, optimizer, scheduler, device, args):
    model.train()
    for i, (images, texts) in enumerate(loader.epoch(epoch)):
        image_features, text_features, logit_scale = model(images.to(device), texts.to(device))
        loss = clip_loss(GatherFeatures.apply(image_features), GatherFeatures.apply(text_features), logit_scale)
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip_norm)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        # Note: we clamp to 4.6052 = ln(100), as in the original paper.
        with torch.no_grad():
            model.logit_scale.clamp_(0, math.log(100))
        if is_master(args) and (i + 1) % args.log_every == 0:
            logging.info(
                f"Train Epoch: {epoch} [{i + 1}/{loader.num_batches}] "
                f"Loss: {loss.item():.6f} LR: {scheduler.get_last_lr()[0]:.6f} Logit Scale: {logit_scale.item():.4f}"
            )


def get_clip_metrics(image_features, text_features, logit_scale):
    logits = logit_scale * image_features @ text_features.T
    target = torch.arange(len(logits), device=logits.device)
    rank = (logits > logits[target, target][:, None]).sum(1)
    return {"image_to_text_mean_rank": rank.float().mean().item() + 1, "image_to_text_R@8": (rank < 8).float().mean().item()}


@torch.no_grad()
def evaluate(model, loader, epoch, device, args):
    metrics = {}
    if not loader.num_batches or (epoch % args.val_frequency and epoch != args.epochs):
        return metrics
    model.eval()

    cumulative_loss, num_samples = 0.0, 0
    all_image_features, all_text_features = [], []
    for images, texts in loader.epoch(epoch):
        image_features, text_features, logit_scale = model(images.to(device), texts.to(device))
        all_image_features.append(image_features.cpu())
        all_text_features.append(text_features.cpu())
        cumulative_loss += clip_loss(image_features, text_features, logit_scale).item() * len(images)
        num_samples += len(images)
    metrics.update(get_clip_metrics(torch.cat(all_image_features), torch.cat(all_text_features), logit_scale.cpu()))
    metrics.update({"clip_val_loss": cumulative_loss / num_samples, "epoch": epoch, "num_samples": num_samples})
    if is_master(args):
        logging.info(f"Eval Epoch: {epoch} " + "\t".join(f"{k}: {v:.4f}" for k, v in metrics.items()))
    return metrics


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=32, help="over all ranks")
    parser.add_argument("--lr", type=float, default=2e-3)
    parser.add_argument("--wd", type=float, default=0.1)
    parser.add_argument("--warmup", type=int, default=4)
    parser.add_argument("--grad-clip-norm", type=float, default=1.0)
    parser.add_argument("--val-frequency", type=int, default=1)
    parser.add_argument("--log-every", type=int, default=3)
    args = parser.parse_args()
    device = init_distributed_device(args)
    logging.basicConfig(level=logging.INFO, format="%(message)s")

    torch.manual_seed(0)
    model = DualEncoder().to(device)
    mesh = init_device_mesh(device.type, (args.world_size,))
    for tower in (model.visual, model.text):
        fully_shard(tower.block, mesh=mesh)
    fully_shard(model, mesh=mesh)

    no_decay = [p for p in model.parameters() if p.ndim < 2]
    decay = [p for p in model.parameters() if p.ndim >= 2]
    groups = [{"params": no_decay, "weight_decay": 0.0}, {"params": decay, "weight_decay": args.wd}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98))

    train_loader = Loader(PairDataset(192, seed=1), args.batch_size, args.rank, args.world_size, shuffle=True)
    val_loader = Loader(PairDataset(32, seed=2), 16)
    total_steps = train_loader.num_batches * args.epochs

    def lr_at(step):
        if step < args.warmup:
            return (step + 1) / args.warmup
        return 0.5 * (1 + math.cos(math.pi * (step - args.warmup) / (total_steps - args.warmup)))

    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    for epoch in range(1, args.epochs + 1):
        train_one_epoch(model, train_loader, epoch, optimizer, scheduler, device, args)
        evaluate(model, val_loader, epoch, device, args)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
