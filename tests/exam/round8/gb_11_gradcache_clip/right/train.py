import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from gradcache import GradCache

BATCH, PATCHES, WORDS, VOCAB = 32, 9, 6, 40


class ImageEncoder(nn.Module):
    def __init__(self, dim=32, out=16):
        super().__init__()
        self.embed = nn.Linear(12, dim)
        self.layer = nn.TransformerEncoderLayer(dim, 4, 64, dropout=0.0, batch_first=True, norm_first=True)
        self.proj = nn.Linear(dim, out, bias=False)

    def forward(self, patches):
        return self.proj(self.layer(self.embed(patches)).mean(1))


class TextEncoder(nn.Module):
    def __init__(self, dim=24, out=16):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.gru = nn.GRUCell(dim, dim)
        self.proj = nn.Linear(dim, out, bias=False)

    def forward(self, words):
        h = torch.zeros(len(words), self.embed.embedding_dim)
        for t in range(words.shape[1]):
            h = self.gru(self.embed(words[:, t]), h)
        return self.proj(h)


def pairs(step):
    g = torch.Generator().manual_seed(600 + step)
    words = torch.randint(VOCAB, (BATCH, WORDS), generator=g)
    book = torch.randn(VOCAB, 12, generator=torch.Generator().manual_seed(1))
    content = book[words].mean(1, keepdim=True)
    return content * 2 + 0.5 * torch.randn(BATCH, PATCHES, 12, generator=g), words


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--chunks", type=int, default=2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="clip_ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(14)
    image, text = ImageEncoder(), TextEncoder()
    fully_shard(image.layer)
    fully_shard(image)
    fully_shard(text)
    log_scale = nn.Parameter(torch.tensor(2.0))  # replicated: every rank computes the same gradient for it
    optimizers = [torch.optim.AdamW(image.parameters(), lr=3e-3, weight_decay=0.05, eps=1e-6),
                  torch.optim.AdamW(text.parameters(), lr=6e-3, weight_decay=0.05, eps=1e-6)]
    scale_opt = torch.optim.SGD([log_scale], lr=0.05)
    cache = GradCache([image, text], log_scale, args.chunks)

    def state():
        out = {"log_scale": log_scale.data, "step": 0}
        for name, model, opt in zip(("image", "text"), (image, text), optimizers):
            out[name], out[name + "_opt"] = get_state_dict(model, opt)
        return out

    first = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d[1:]))
        s = state()
        dcp.load(s, checkpoint_id=os.path.join(args.resume, last))
        for name, model, opt in zip(("image", "text"), (image, text), optimizers):
            set_state_dict(model, opt, model_state_dict=s[name], optim_state_dict=s[name + "_opt"])
        log_scale.data.copy_(s["log_scale"])
        first = s["step"]

    for step in range(first, args.steps):
        inputs = [t.chunk(world)[rank] for t in pairs(step)]
        loss = cache(inputs)
        for model, opt in zip((image, text), optimizers):
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
        scale_opt.step()
        log_scale.data.clamp_(0.0, 4.6)
        if rank == 0 and step % 3 == 2:
            print(f"step {step + 1} loss {loss:.6f} scale {log_scale.exp().item():.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save({**state(), "step": step + 1}, checkpoint_id=os.path.join(args.out, f"s{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
