"""Fine-tuning of a small transformer classifier with layer-wise learning-rate decay (LLRD).

Lower layers get a smaller learning rate (base * decay ** distance from the head), LayerNorm and biases no weight decay.

    torchrun --standalone --nproc-per-node 2 train.py --steps 30 --decay 0.5
"""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

VOCAB, SEQ, CLASSES = 30, 12, 6


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attn = nn.MultiheadAttention(dim, heads, bias=False, batch_first=True)
        self.ln1, self.ln2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        h = self.ln1(x)
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.mlp(self.ln2(x))


class TextClassifier(nn.Module):
    def __init__(self, dim=32, heads=2, depth=3):
        super().__init__()
        self.embed = nn.Embedding(VOCAB, dim)
        self.pos = nn.Parameter(torch.randn(SEQ, dim) * 0.02)
        self.layers = nn.ModuleList(Layer(dim, heads) for _ in range(depth))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, CLASSES)

    def forward(self, ids):
        x = self.embed(ids) + self.pos
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x).mean(1))

    def stages(self):
        """From the bottom to the top."""
        yield [*self.embed.parameters(), self.pos]
        for layer in self.layers:
            yield list(layer.parameters())
        yield [*self.norm.parameters(), *self.head.parameters()]


def lr_scales(model, decay):
    stages = list(model.stages())
    return {p: decay ** (len(stages) - 1 - i) for i, stage in enumerate(stages) for p in stage}


def param_groups(model, scales, lr, wd):
    groups = {}
    for p in model.parameters():
        key = (lr * scales.get(p, 1.0), wd if p.ndim > 1 else 0.0)
        groups.setdefault(key, []).append(p)
    return [{"params": ps, "lr": k[0], "weight_decay": k[1]} for k, ps in groups.items()]


def make_data(n=600):
    """The class is decided by which of the marker tokens 0..5 occurs most often."""
    g = torch.Generator().manual_seed(21)
    y = torch.randint(0, CLASSES, (n,), generator=g)
    ids = torch.randint(0, VOCAB, (n, SEQ), generator=g)
    where = torch.rand(n, SEQ, generator=g) < 0.3
    return torch.where(where, y[:, None], ids), y


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--decay", type=float, default=0.5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt_llrd")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(5)
    model = TextClassifier()
    scales = lr_scales(model, args.decay)
    mesh = init_device_mesh("cpu", (world,))
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(param_groups(model, scales, args.lr, 0.05), lr=args.lr)
    sched = torch.optim.lr_scheduler.LinearLR(opt, start_factor=1.0, end_factor=0.1, total_iters=args.steps)

    step = 0
    if args.resume:
        newest = os.path.join(args.resume, sorted(os.listdir(args.resume))[-1])
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=newest)
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        sched.load_state_dict(state["sched"])
        step = state["step"]

    ids, y = make_data()
    while step < args.steps:
        idx = torch.randint(0, len(y), (args.batch,), generator=torch.Generator().manual_seed(900 + step))
        idx = idx[rank::world]
        logits = model(ids[idx])
        loss = F.cross_entropy(logits, y[idx], label_smoothing=0.05)
        opt.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        sched.step()
        step += 1
        stats = torch.stack([loss.detach(), (logits.argmax(-1) == y[idx]).float().mean()]) / world
        dist.all_reduce(stats)
        if rank == 0:
            print(
                f"step {step} loss {stats[0]:.4f} acc {stats[1]:.3f} head lr {sched.get_last_lr()[-1]:.2e}", flush=True
            )
        if args.save_every and step % args.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save(
                {"model": msd, "optim": osd, "sched": sched.state_dict(), "step": step},
                checkpoint_id=os.path.join(args.out, f"step{step:06d}"),
            )

    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
