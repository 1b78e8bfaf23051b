"""CLIP style pretraining with an exponential moving average of the weights, on FSDP2.

The average is what gets evaluated and what is released; ``--resume`` continues
the newest checkpoint of the ``--checkpoint-path`` folder.
"""
import argparse
import math
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

NUM_CONCEPTS, IMAGE_DIM, NUM_PATCHES, VOCAB, CONTEXT = 32, 24, 6, 64, 6


class MixerBlock(nn.Module):
    def __init__(self, tokens, width):
        super().__init__()
        self.norm1 = nn.LayerNorm(width)
        self.token_mix = nn.Linear(tokens, tokens)
        self.norm2 = nn.LayerNorm(width)
        self.channel_mix = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.token_mix(self.norm1(x).transpose(1, 2)).transpose(1, 2)
        return x + self.channel_mix(self.norm2(x))


class ImageTower(nn.Module):
    def __init__(self, width, embed_dim, depth):
        super().__init__()
        self.patch_embed = nn.Linear(IMAGE_DIM, width)
        self.blocks = nn.ModuleList(MixerBlock(NUM_PATCHES, width) for _ in range(depth))
        self.head = nn.Linear(width, embed_dim, bias=False)

    def forward(self, x):
        x = self.patch_embed(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class TextTower(nn.Module):
    def __init__(self, width, embed_dim, depth):
        super().__init__()
        self.token_embed = nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(MixerBlock(CONTEXT, width) for _ in range(depth))
        self.head = nn.Linear(width, embed_dim, bias=False)

    def forward(self, ids):
        x = self.token_embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean(1))


class CLIP(nn.Module):
    def __init__(self, width=32, embed_dim=16, depth=2):
        super().__init__()
        self.image = ImageTower(width, embed_dim, depth)
        self.text = TextTower(width, embed_dim, depth)
        self.logit_scale = nn.Parameter(torch.full((1,), math.log(10.0)))

    def forward(self, images, ids):
        return F.normalize(self.image(images), dim=-1), F.normalize(self.text(ids), dim=-1), self.logit_scale.exp()


class AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        out = [torch.empty_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(out, x.contiguous())
        return torch.cat(out)

    @staticmethod
    def backward(ctx, grad):
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def contrastive_loss(image_features, text_features, scale):
    logits = scale * AllGather.apply(image_features) @ AllGather.apply(text_features).T
    target = torch.arange(len(logits), device=logits.device)
    return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target))


class Pairs:
    def __init__(self, seed, device):
        world = torch.Generator().manual_seed(99)
        self.prototypes = torch.randn(NUM_CONCEPTS, NUM_PATCHES, IMAGE_DIM, generator=world)
        self.captions = torch.randint(0, VOCAB, (NUM_CONCEPTS, CONTEXT), generator=world)
        self.seed, self.device = seed, device

    def batch(self, step, size, part=0, parts=1):
        g = torch.Generator().manual_seed(self.seed * 1_000_000 + step)
        concept = torch.randint(0, NUM_CONCEPTS, (size,), generator=g)
        images = self.prototypes[concept] + torch.randn(size, NUM_PATCHES, IMAGE_DIM, generator=g)
        swap = torch.rand(size, CONTEXT, generator=g) < 0.2
        ids = torch.where(swap, torch.randint(0, VOCAB, (size, CONTEXT), generator=g), self.captions[concept])
        return tuple(t.chunk(parts)[part].to(self.device) for t in (images, ids, concept))


class TrainingTask:
    """The model in training together with its moving average and optimizer."""

    def __init__(self, model, optimizer, ema_decay):
        self.model = model
        self.optimizer = optimizer
        self.ema_decay = ema_decay
        self.ema = {name: p.detach().clone() for name, p in model.named_parameters()}

    def training_step(self, images, ids):
        loss = contrastive_loss(*self.model(images, ids))
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.update_ema()
        return loss.item()

    @torch.no_grad()
    def update_ema(self):
        for name, p in self.model.named_parameters():
            self.ema[name].lerp_(p.detach(), 1.0 - self.ema_decay)

    @torch.no_grad()
    def swap_ema(self):
        for name, p in self.model.named_parameters():
            current = p.detach().clone()
            p.copy_(self.ema[name])
            self.ema[name].copy_(current)

    def save_checkpoint(self, path):
        model_state, optim_state = get_state_dict(self.model, self.optimizer)
        state = {"state_dict": model_state, "optimizer": optim_state, "state_dict_ema": self.ema}
        dcp.save(state, checkpoint_id=str(path))

    def load_checkpoint(self, path):
        model_state, optim_state = get_state_dict(self.model, self.optimizer)
        state = {"state_dict": model_state, "optimizer": optim_state, "state_dict_ema": self.ema}
        dcp.load(state, checkpoint_id=str(path))
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["state_dict"], optim_state_dict=state["optimizer"]
        )


@torch.no_grad()
def evaluate(task, data, batches=2, size=32):
    """Zero-shot style classification and pair loss with the averaged weights."""
    rank, world = dist.get_rank(), dist.get_world_size()
    task.swap_ema()
    sums = torch.zeros(3, device=data.device)
    captions = data.captions.to(data.device)
    for i in range(batches):
        images, ids, concept = data.batch(i, size, rank, world)
        image_features, text_features, scale = task.model(images, ids)
        sums[0] += contrastive_loss(image_features, text_features, scale) * len(images)
        _, classifier, _ = task.model(images[:1], captions)
        sums[1] += ((image_features @ classifier.T).argmax(1) == concept).sum()
        sums[2] += len(images)
    dist.all_reduce(sums)
    task.swap_ema()
    return (sums[0] / sums[2]).item(), (sums[1] / sums[2]).item()


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=32)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--ema-decay", type=float, default=0.9)
    parser.add_argument("--eval-every", type=int, default=8)
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--checkpoint-path", default=None)
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(3)
    model = CLIP().to(device)
    mesh = init_device_mesh(device.type, (world,))
    for block in [*model.image.blocks, *model.text.blocks]:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh, reshard_after_forward=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), weight_decay=0.05)
    task = TrainingTask(model, optimizer, args.ema_decay)

    start = 0
    if args.resume:
        start = int((Path(args.checkpoint_path) / "latest").read_text())
        task.load_checkpoint(Path(args.checkpoint_path) / f"step_{start}")
        if rank == 0:
            print(f"=> resuming checkpoint at step {start}")

    train, val = Pairs(1, device), Pairs(2, device)
    for step in range(start + 1, args.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = args.lr * min(1.0, step / 4) * 0.5 * (1 + math.cos(math.pi * step / (args.steps + 1)))
        images, ids, _ = train.batch(step, args.batch_size, rank, world)
        loss = task.training_step(images, ids)
        if rank == 0 and step % 4 == 0:
            print(f"train step {step} loss {loss:.6f}", flush=True)
        if step % args.eval_every == 0:
            val_loss, top1 = evaluate(task, val)
            if rank == 0:
                print(f"eval step {step} ema_val_loss {val_loss:.6f} zeroshot_top1 {top1:.4f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            task.save_checkpoint(Path(args.checkpoint_path) / f"step_{step}")
            if rank == 0:
                (Path(args.checkpoint_path) / "latest").write_text(str(step))
            dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
