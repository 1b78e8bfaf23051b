"""Masked spectrogram modelling (HuBERT-like, regression) on clips of different lengths."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

MELS = 16


class EncoderLayer(nn.Module):
    def __init__(self, dim, heads=2):
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x, valid):
        b, t, d = x.shape
        q, k, v = self.qkv(self.ln1(x)).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=valid[:, None, None, :])
        x = x + self.proj(y.transpose(1, 2).reshape(b, t, d))
        return x + self.mlp(self.ln2(x))


class MaskedSpectrogramModel(nn.Module):
    def __init__(self, dim=32, layers=2, max_len=24):
        super().__init__()
        self.inp = nn.Linear(MELS, dim)
        self.mask_token = nn.Parameter(torch.randn(dim) * 0.02)
        self.pos = nn.Parameter(torch.randn(max_len, dim) * 0.02)
        self.layers = nn.ModuleList([EncoderLayer(dim) for _ in range(layers)])
        self.out = nn.Linear(dim, MELS)

    def forward(self, mel, masked, valid):
        x = torch.where(masked[..., None], self.mask_token, self.inp(mel)) + self.pos[: mel.shape[1]]
        for layer in self.layers:
            x = layer(x, valid)
        return self.out(x)


def make_batch(index, batch, max_len, seed):
    """Harmonic sweeps; clip lengths from 6 to max_len frames, sorted so that neighbours are alike (bucketing)."""
    g = torch.Generator().manual_seed(seed + 31 * index)
    lens = torch.randint(6, max_len + 1, (batch,), generator=g).sort().values
    f0 = torch.rand(batch, 1, 1, generator=g) * 2 + 1
    level = lens[:, None, None] / max_len
    t = torch.arange(max_len)[None, :, None]
    m = torch.arange(MELS)[None, None, :]
    mel = level * torch.cos(0.3 * f0 * t + 0.4 * m) + 0.1 * torch.randn(batch, max_len, MELS, generator=g)
    valid = torch.arange(max_len)[None] < lens[:, None]
    masked = (torch.rand(batch, max_len, generator=g) < 0.4) & valid
    masked[:, 0] = True
    return mel * valid[..., None], masked, valid


def accumulation_window(step, args, rank, world):
    parts = []
    for i in range(args.accum):
        batch = make_batch(step * args.accum + i, args.micro_batch, args.max_len, args.seed)
        n = args.micro_batch // world
        parts.append([x[rank * n:(rank + 1) * n] for x in batch])
    return parts


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=16)
    ap.add_argument("--accum", type=int, default=2)
    ap.add_argument("--micro-batch", type=int, default=8)
    ap.add_argument("--max-len", type=int, default=24)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--seed", type=int, default=5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = MaskedSpectrogramModel(max_len=args.max_len)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)

    first = 0
    if args.resume:
        last = max(os.listdir(args.resume), key=lambda d: int(d.split("-")[1]))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "opt": o, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        first = state["step"]

    for step in range(first, args.steps):
        window = accumulation_window(step, args, rank, world)
        # number of masked frames of this optimizer step
        frames = torch.tensor(float(sum(masked.sum() for _, masked, _ in window)))
        total = torch.zeros(())
        for i, (mel, masked, valid) in enumerate(window):
            model.set_requires_gradient_sync(i == len(window) - 1)
            err = (model(mel, masked, valid) - mel).pow(2).mean(-1)
            loss = (err * masked).sum() / frames
            loss.backward()
            total += loss.detach()
        opt.step()
        opt.zero_grad(set_to_none=True)

        dist.all_reduce(total)
        if rank == 0:
            print(f"step {step + 1:3d} masked mse {total.item() / world:.5f}")
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "opt": o, "step": step + 1}, checkpoint_id=f"{args.out}/step-{step + 1}")

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
