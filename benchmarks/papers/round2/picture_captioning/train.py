"""Captioning of small pictures: patch features take the place of image tokens in the text.

    torchrun --nproc-per-node 2 train.py
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

COLOURS = ["red", "green", "blue", "white"]
SHAPES = ["square", "bar", "cross"]
PLACES = ["top", "bottom"]
WORDS = ["<pad>", "<img>", "<eos>", "a", "at", "the"] + COLOURS + SHAPES + PLACES
SIDE, PATCH = 8, 4
DIM, HEADS, LAYERS, MAX_TOKENS = 32, 4, 2, 512
BATCH, STEPS, LR = 16, 48, 5e-3


class Processor:
    """Texts with one <img> mark each and their pictures -> model inputs."""

    def __init__(self, patches_per_image):
        self.patches = patches_per_image
        self.index = {w: i for i, w in enumerate(WORDS)}
        self.image_id, self.pad_id = self.index["<img>"], self.index["<pad>"]

    def patchify(self, images):
        x = images.unfold(2, PATCH, PATCH).unfold(3, PATCH, PATCH)  # (b, 3, rows, cols, p, p)
        return x.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)

    def tokenize(self, text):
        ids = []
        for word in text.split():
            ids.extend([self.index[word]] * (self.patches if word == "<img>" else 1))
        return ids

    def __call__(self, texts, images):
        rows = []
        for text in texts:
            rows.append(self.tokenize(text))
        width = max(len(r) for r in rows)
        ids = torch.tensor([r + [self.pad_id] * (width - len(r)) for r in rows])
        labels = ids.roll(-1, 1)
        labels[:, -1] = self.pad_id
        labels = labels.masked_fill((labels == self.pad_id) | (labels == self.image_id), -100)
        return {"input_ids": ids, "labels": labels, "patches": self.patchify(images)}


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv = nn.Linear(DIM, 3 * DIM)
        self.proj = nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 3 * DIM), nn.GELU(), nn.Linear(3 * DIM, DIM))

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(b, t, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        a = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(a.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.norm2(x))


class Captioner(nn.Module):
    def __init__(self, image_id):
        super().__init__()
        self.image_id = image_id
        self.words = nn.Embedding(len(WORDS), DIM)
        self.project = nn.Sequential(nn.Linear(3 * PATCH * PATCH, DIM), nn.GELU(), nn.Linear(DIM, DIM))
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm = nn.LayerNorm(DIM)
        self.head = nn.Linear(DIM, len(WORDS))
        angle = torch.arange(MAX_TOKENS).unsqueeze(1) * 200.0 ** (-torch.arange(DIM // 2) * 2 / DIM)
        self.register_buffer("place", torch.cat([angle.sin(), angle.cos()], 1), persistent=False)

    def forward(self, input_ids, patches):
        x = self.words(input_ids)
        features = self.project(patches).flatten(0, 1)
        mask = (input_ids == self.image_id).unsqueeze(-1)
        x = x.masked_scatter(mask, features) + self.place[: x.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


PALETTE = torch.tensor([[1.0, 0, 0], [0, 1, 0], [0, 0, 1], [1, 1, 1]])


def pictures(step, count=BATCH, seed=0):
    g = torch.Generator().manual_seed(12_000 + seed + step)
    pick = lambda n: torch.randint(0, n, (count,), generator=g).tolist()
    images = 0.1 * torch.randn(count, 3, SIDE, SIDE, generator=g)
    texts = []
    for i, (c, s, p, left) in enumerate(zip(pick(len(COLOURS)), pick(len(SHAPES)), pick(2), pick(5))):
        stamp = torch.zeros(4, 4)
        if SHAPES[s] == "square":
            stamp[:] = 1
        elif SHAPES[s] == "bar":
            stamp[1:3] = 1
        else:
            stamp[1:3], stamp[:, 1:3] = 1, 1
        top = 0 if PLACES[p] == "top" else 4
        images[i, :, top:top + 4, left:left + 4] += PALETTE[c].view(3, 1, 1) * stamp
        texts.append(f"<img> a {COLOURS[c]} {SHAPES[s]} at the {PLACES[p]} <eos>")
    return texts, images


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    mesh = init_device_mesh(device.type, (world,))

    processor = Processor((SIDE // PATCH) ** 2)
    torch.manual_seed(4)
    model = Captioner(processor.image_id).to(device)
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.01)
    sched = torch.optim.lr_scheduler.LinearLR(opt, 1.0, 0.1, STEPS)

    n = BATCH // world
    own = slice(rank * n, (rank + 1) * n)

    def caption_loss(texts, images):
        batch = {k: t.to(device) for k, t in processor(texts, images).items()}
        logits = model(batch["input_ids"], batch["patches"])
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    @torch.no_grad()
    def evaluate():
        """Mean loss over single pictures, as at inference time."""
        model.eval()
        texts, images = pictures(0, count=8, seed=500_000)
        total = sum(caption_loss([texts[i]], images[i:i + 1]) for i in range(rank, 8, world))
        dist.all_reduce(total)
        model.train()
        return total.item() / 8

    for step in range(1, STEPS + 1):
        texts, images = pictures(step)
        loss = caption_loss(texts[own], images[own])
        loss.backward()
        opt.step()
        sched.step()
        opt.zero_grad()
        if step % 12 == 0:
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            single = evaluate()
            if rank == 0:
                print(f"step {step:3d}  loss {shown.item() / world:.5f}  eval {single:.5f}", flush=True)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
