"""Training a text classifier with ReLoRA: frozen weights, low-rank bypasses, merge and restart every 8 steps with a
short warm-up of the learning rate after each restart."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from relora import ReLoRALinear, merge_and_restart


class TextClassifier(nn.Module):
    def __init__(self, vocab=50, dim=32, classes=4):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.hidden = nn.ModuleList([ReLoRALinear(dim, 64), ReLoRALinear(64, 64), ReLoRALinear(64, dim)])
        self.norm = nn.LayerNorm(dim)
        self.out = nn.Linear(dim, classes)

    def forward(self, ids):
        h = self.embed(ids)
        gate = torch.softmax(h.mean(-1), -1)
        h = (gate[..., None] * h).sum(1) * 4
        r = h
        for layer in self.hidden:
            r = F.gelu(layer(r))
        return self.out(self.norm(h + r))


def texts(n, seed):
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, 4, (n,), generator=g)
    topic = 12 * y[:, None] + torch.randint(0, 14, (n, 12), generator=g)
    other = torch.randint(0, 50, (n, 12), generator=g)
    return torch.where(torch.rand(n, 12, generator=g) < 0.5, topic, other), y


def learning_rate(step, base, restart_every, warmup=3):
    since = step % restart_every
    return base * min(1.0, (since + 1) / warmup)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=32)
    ap.add_argument("--restart-every", type=int, default=8)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=8e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(31)
    model = TextClassifier()
    for layer in model.hidden:
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adam([p for p in model.parameters() if p.requires_grad], lr=args.lr)

    start = 0
    if args.resume:
        start = max(int(d) for d in os.listdir(args.resume))
        m, o = get_state_dict(model, opt)
        state = {"model": m, "optim": o}
        dcp.load(state, checkpoint_id=f"{args.resume}/{start}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])

    for step in range(start, args.steps):
        if step and step % args.restart_every == 0:
            merge_and_restart(model.hidden, opt, seed=step)
            if rank == 0:
                print(f"merged the bypasses before step {step + 1}")
        for group in opt.param_groups:
            group["lr"] = learning_rate(step, args.lr, args.restart_every)
        ids, y = (t.chunk(world)[rank] for t in texts(args.batch, seed=step))
        loss = F.cross_entropy(model(ids), y)
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o}, checkpoint_id=f"{args.out}/{step + 1}")

    with torch.no_grad():
        ids, y = texts(200, seed=10_000)
        accuracy = (model(ids).argmax(1) == y).float().mean().item()
    if rank == 0:
        print(f"accuracy {accuracy:.4f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
