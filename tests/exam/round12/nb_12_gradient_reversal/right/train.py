"""Domain-adversarial segmentation (DANN).

One backward pass serves both players: the domain critic descends its loss, and through the reversal layer the feature
network ascends it. The two players are sharded apart and have optimizers of their own.
"""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Reverse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.weight = weight
        return x.view_as(x)

    @staticmethod
    def backward(ctx, grad):
        return -ctx.weight * grad, None


class Features(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.a = nn.Conv2d(1, width, 3, padding=1)
        self.b = nn.Conv2d(width, width, 3, padding=1)

    def forward(self, x):
        return F.gelu(self.b(F.gelu(self.a(x))))


class Segmenter(nn.Module):
    def __init__(self, width=24):
        super().__init__()
        self.features = Features(width)
        self.classify = nn.Conv2d(width, 3, 1)

    def forward(self, x):
        f = self.features(x)
        return self.classify(f), f


def scenes(n, domain, g):
    label = torch.zeros(n, 12, 12, dtype=torch.long)
    for i in range(n):
        r, c = torch.randint(0, 6, (2,), generator=g).tolist()
        label[i, r:r + 5, c:c + 4] = 1
        r, c = torch.randint(0, 8, (2,), generator=g).tolist()
        label[i, r:r + 3, c:c + 3] = 2
    image = label.float() - 1 + 0.4 * torch.randn(n, 12, 12, generator=g)
    if domain == "target":
        image = 0.6 * image + 0.5
    return image[:, None], label


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(1)
    seg = Segmenter()
    critic = nn.Sequential(nn.Linear(24, 32), nn.GELU(), nn.Linear(32, 1))
    fully_shard(seg.features)
    fully_shard(seg)
    fully_shard(critic)
    opt_seg = torch.optim.SGD(seg.parameters(), lr=0.1, momentum=0.9)
    opt_critic = torch.optim.Adam(critic.parameters(), lr=2e-3, eps=1e-6)
    pairs = (("seg", seg, opt_seg), ("critic", critic, opt_critic))

    g = torch.Generator().manual_seed(40)
    source_x, source_y = scenes(48, "source", g)
    target_x, _ = scenes(48, "target", g)

    start = 0
    if args.resume:
        path = os.path.join(args.resume, "last.pt")
        blob = torch.load(path) if rank == 0 else None
        head = [blob["step"] if rank == 0 else None]
        dist.broadcast_object_list(head)
        start = head[0]
        for name, net, opt in pairs:
            set_model_state_dict(net, blob[name] if rank == 0 else {}, options=FROM_RANK0)
            set_optimizer_state_dict(net, opt, blob[name + "_opt"] if rank == 0 else {}, options=FROM_RANK0)

    for step in range(start, args.steps):
        order = torch.Generator().manual_seed(step)
        s = torch.randperm(48, generator=order)[:16][rank::world]
        t = torch.randperm(48, generator=order)[:16][rank::world]
        strength = 0.3 * (2 / (1 + math.exp(-8 * step / args.steps)) - 1)

        logits, f = seg(torch.cat([source_x[s], target_x[t]]))
        seg_loss = F.cross_entropy(logits[:len(s)], source_y[s])
        pooled = Reverse.apply(f.mean(dim=(2, 3)), strength)
        domain = torch.cat([torch.ones(len(s), 1), torch.zeros(len(t), 1)])
        domain_loss = F.binary_cross_entropy_with_logits(critic(pooled), domain)
        (seg_loss + domain_loss).backward()
        for _, _, opt in pairs:
            opt.step()
            opt.zero_grad()

        if step % 6 == 0 or step == args.steps - 1:
            shown = torch.stack([seg_loss.detach(), domain_loss.detach()]) / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"step {step} loss {shown[0].item():.5f} domain {shown[1].item():.5f}", flush=True)
        if args.out and args.save_every and (step + 1) % args.save_every == 0:
            blob = {"step": step + 1}
            for name, net, opt in pairs:
                blob[name] = get_model_state_dict(net, options=FULL)
                blob[name + "_opt"] = get_optimizer_state_dict(net, opt, options=FULL)
            if rank == 0:
                torch.save(blob, os.path.join(args.out, "last.pt"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
