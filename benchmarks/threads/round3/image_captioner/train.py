"""Fine-tune a tiny vision-language model to caption synthetic scenes (FSDP2).

A scene is an 18x18 picture with four coloured shapes on a 3x3 raster; the caption
names shape, colour and cell of each of them in reading order. Image patches are a
prefix of the decoder sequence, the loss is taken on the caption part only.

    torchrun --nproc_per_node 2 train.py --accumulate 4
"""
import argparse
import inspect
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

SHAPES, COLOURS, CELLS = 3, 3, 9
BOS, OBJECTS = 0, 4
VOCAB = 1 + SHAPES + COLOURS + CELLS
CAPTION = 3 * OBJECTS
PATCHES = CELLS
PATCH_DIM = 3 * 6 * 6


def scenes(step, count, seed):
    """Returns patches [count, 9, 108] and caption ids [count, 1 + 12]."""
    g = torch.Generator().manual_seed(seed * 9973 + step)
    order = torch.rand(count, CELLS, generator=g).argsort(dim=1)[:, :OBJECTS]
    cells = order.sort(dim=1).values
    shape = torch.randint(0, SHAPES, (count, OBJECTS), generator=g)
    colour = torch.randint(0, COLOURS, (count, OBJECTS), generator=g)
    stamps = torch.zeros(SHAPES, 6, 6)
    stamps[0, 1:5, 1:5] = 1
    stamps[1] = torch.eye(6)
    stamps[2, 2:4] = 1
    patches = 0.1 * torch.randn(count, CELLS, 3, 6, 6, generator=g)
    rows = torch.arange(count)[:, None].expand(count, OBJECTS)
    patches[rows, cells, colour] += stamps[shape]
    words = torch.stack([1 + shape, 1 + SHAPES + colour, 1 + SHAPES + COLOURS + cells], dim=2)
    caption = torch.cat([torch.full((count, 1), BOS), words.flatten(1)], dim=1)
    return patches.flatten(2), caption


class DecoderLayer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.ln_attn, self.ln_mlp = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.up, self.down = nn.Linear(dim, 4 * dim), nn.Linear(4 * dim, dim)

    def forward(self, x, mask):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln_attn(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        att = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        x = x + self.proj(att.transpose(1, 2).reshape(b, t, d))
        return x + self.down(F.gelu(self.up(self.ln_mlp(x))))


class CaptionModel(nn.Module):
    accepts_loss_kwargs = False

    def __init__(self, dim, depth, heads):
        super().__init__()
        self.patch = nn.Linear(PATCH_DIM, dim)
        self.words = nn.Embedding(VOCAB, dim)
        self.place = nn.Parameter(0.02 * torch.randn(PATCHES + CAPTION, dim))
        self.layers = nn.ModuleList(DecoderLayer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.lm_head = nn.Linear(dim, VOCAB)

    def forward(self, patches, input_ids, labels=None, **kwargs):
        x = torch.cat([self.patch(patches), self.words(input_ids)], dim=1) + self.place
        total = x.shape[1]
        mask = torch.ones(total, total, dtype=torch.bool, device=x.device).tril()
        mask[:PATCHES, :PATCHES] = True
        for layer in self.layers:
            x = layer(x, mask)
        logits = self.lm_head(self.norm(x[:, PATCHES:]))
        loss = None
        if labels is not None:
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


class SFTTrainer:
    def __init__(self, model, args, device):
        self.model, self.args, self.device = model, args, device
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        forward = inspect.signature(type(model).forward)
        takes_kwargs = any(p.kind is p.VAR_KEYWORD for p in forward.parameters.values())
        self.model_accepts_loss_kwargs = getattr(model, "accepts_loss_kwargs", takes_kwargs)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)
        self.scheduler = torch.optim.lr_scheduler.LinearLR(self.optimizer, 1.0, 0.2, total_iters=args.steps)

    def micro_batches(self, step):
        patches, caption = scenes(step, self.args.batch, self.args.seed)
        parts = zip(patches.chunk(self.args.accumulate), caption.chunk(self.args.accumulate))
        for part_patches, part_caption in parts:
            mine = part_caption.chunk(self.world)[self.rank].to(self.device)
            yield {
                "patches": part_patches.chunk(self.world)[self.rank].to(self.device),
                "input_ids": mine[:, :-1],
                "labels": mine[:, 1:],
            }

    def compute_loss(self, inputs, num_items):
        if self.model_accepts_loss_kwargs:
            return self.model(**inputs, num_items_in_batch=num_items)["loss"]
        return self.model(**inputs)["loss"] / self.args.accumulate

    def training_step(self, step):
        batch = list(self.micro_batches(step))
        num_items = sum(inputs["labels"].numel() for inputs in batch)
        total = torch.zeros((), device=self.device)
        for index, inputs in enumerate(batch):
            self.model.set_requires_gradient_sync(index + 1 == len(batch))
            loss = self.compute_loss(inputs, num_items)
            loss.backward()
            total += loss.detach()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return total.item() / self.world

    def train(self):
        self.model.train()
        for step in range(self.args.steps):
            loss = self.training_step(step)
            if self.rank == 0:
                print({"step": step, "loss": round(loss, 6)}, flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--accumulate", type=int, default=4)
    parser.add_argument("--dim", type=int, default=48)
    parser.add_argument("--depth", type=int, default=2)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--seed", type=int, default=2)
    args = parser.parse_args()

    gpu = torch.cuda.is_available()
    dist.init_process_group("nccl" if gpu else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if gpu else torch.device("cpu")
    if gpu:
        torch.cuda.set_device(device)

    torch.manual_seed(args.seed)
    model = CaptionModel(args.dim, args.depth, args.heads).to(device)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    SFTTrainer(model, args, device).train()
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
