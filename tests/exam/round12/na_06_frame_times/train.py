"""Frame labelling of long recordings. A frame has an energy vector and its time in seconds; a slow tone pattern that is
locked to the clock decides the label. bf16 compute, fp32 master weights and reductions."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

N_FEAT, FRAMES, HOP, CLASSES, DIM = 8, 32, 0.02, 4, 32


class ClockEmbedding(nn.Module):
    """Phases of the frame time at a few fixed periods, always computed in fp32."""

    def __init__(self, dim, periods=(0.16, 0.32, 0.64, 2.56)):
        super().__init__()
        self.register_buffer("omega", 2 * torch.pi / torch.tensor(periods), persistent=False)
        self.lin = nn.Linear(2 * len(periods), dim)

    def forward(self, seconds):
        phase = seconds.float()[..., None] * self.omega
        feats = torch.cat([phase.sin(), phase.cos()], -1)
        return self.lin(feats.to(self.lin.weight.dtype))


class FrameBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.up, self.gate, self.down = nn.Linear(dim, 2 * dim), nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim)

    def forward(self, x):
        n = F.rms_norm(x, x.shape[-1:])
        return x + self.down(F.silu(self.gate(n)) * self.up(n))


class FrameTagger(nn.Module):
    def __init__(self):
        super().__init__()
        self.inp = nn.Linear(N_FEAT, DIM)
        self.clock = ClockEmbedding(DIM)
        self.blocks = nn.ModuleList(FrameBlock(DIM) for _ in range(2))
        self.out = nn.Linear(DIM, CLASSES, bias=False)

    def forward(self, feats, seconds):
        x = self.inp(feats.to(self.inp.weight.dtype)) + self.clock(seconds)
        for b in self.blocks:
            x = b(x)
        return self.out(F.rms_norm(x, x.shape[-1:]))


def recordings(step, n):
    g = torch.Generator().manual_seed(100 + step)
    start = torch.randint(1, 3000, (n, 1), generator=g) * HOP
    seconds = start + torch.arange(FRAMES) * HOP
    feats = torch.randn(n, FRAMES, N_FEAT, generator=g)
    slot = torch.floor(seconds / 0.08 + 1e-3).long() % 2  # first or second half of the 160 ms cycle
    label = slot + 2 * (feats[..., 0] > 0).long()
    return feats, seconds.float(), label


def files(folder, step, rank, world):
    return os.path.join(folder, f"shard-{step}-{rank}-{world}.pt")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=0.15)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(12)
    model = FrameTagger()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
    for b in model.blocks:
        fully_shard(b, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9)

    done = 0
    if args.resume and os.path.exists(os.path.join(args.resume, "last")):
        with open(os.path.join(args.resume, "last")) as f:
            done = int(f.read())
        blob = torch.load(files(args.resume, done, rank, world))
        for name, p in model.named_parameters():
            p.detach().to_local().copy_(blob[name])
            opt.state[p]["momentum_buffer"] = torch.zeros_like(p.detach())
            opt.state[p]["momentum_buffer"].to_local().copy_(blob["momentum/" + name])

    n = args.batch // world
    for step in range(done, args.steps):
        feats, seconds, label = (t[rank * n:(rank + 1) * n] for t in recordings(step, args.batch))
        logits = model(feats, seconds)
        loss = F.cross_entropy(logits.float().flatten(0, 1), label.flatten())
        loss.backward()
        opt.step()
        opt.zero_grad()
        if step == 0 or step % 4 == 3:
            both = torch.stack([loss.detach(), (logits.argmax(-1) == label).float().mean()]) / world
            dist.all_reduce(both)
            if rank == 0:
                print(f"step {step + 1} loss {both[0]:.4f} frame accuracy {both[1]:.3f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            os.makedirs(args.out, exist_ok=True)
            blob = {n_: p.detach().to_local() for n_, p in model.named_parameters()}
            blob.update({"momentum/" + n_: opt.state[p]["momentum_buffer"].to_local() for n_, p in model.named_parameters()})
            torch.save(blob, files(args.out, step + 1, rank, world))
            dist.barrier()
            if rank == 0:
                with open(os.path.join(args.out, "last"), "w") as f:
                    f.write(str(step + 1))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
