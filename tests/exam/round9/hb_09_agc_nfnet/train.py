import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from agc import adaptive_clip_
from nfnet import NFNet


def synth(n, gen):
    y = torch.randint(0, 5, (n,), generator=gen)
    proto = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    return proto[y] + 0.8 * torch.randn(n, 3, 8, 8, generator=gen), y


def label_smooth_mixup(x, y, gen):
    lam = torch.rand(len(x), 1, generator=gen) * 0.3
    perm = torch.randperm(len(x), generator=gen)
    t = F.one_hot(y, 5).float()
    t = (1 - lam) * t + lam * t[perm]
    lam = lam.view(-1, 1, 1, 1)
    return (1 - lam) * x + lam * x[perm], 0.9 * t + 0.02


ap = argparse.ArgumentParser()
ap.add_argument("--steps", type=int, default=30)
ap.add_argument("--batch", type=int, default=16)
ap.add_argument("--lr", type=float, default=0.2)
ap.add_argument("--clip", type=float, default=0.05)
ap.add_argument("--save-every", type=int, default=0)
ap.add_argument("--out", default="out")
ap.add_argument("--resume", default="")
ap.add_argument("--export", default="")
args = ap.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(1)
net = NFNet()
for block in net.blocks:
    fully_shard(block)
fully_shard(net)
body = [p for n, p in net.named_parameters() if not n.startswith("fc.")]  # the head is not clipped
opt = torch.optim.SGD(net.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=2e-5)
gen = torch.Generator().manual_seed(2)
start = 0
if args.resume:
    m, o = get_state_dict(net, opt)
    ck = {"net": m, "opt": o, "gen": gen.get_state(), "step": 0}
    dcp.load(ck, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume), key=int)))
    set_state_dict(net, opt, model_state_dict=ck["net"], optim_state_dict=ck["opt"])
    gen.set_state(ck["gen"])
    start = ck["step"]

for step in range(start, args.steps):
    # mixup pairs images of the whole batch, so it is done before the batch is divided
    x, t = label_smooth_mixup(*synth(args.batch, gen), gen)
    x, t = x.chunk(world)[rank], t.chunk(world)[rank]
    loss = F.cross_entropy(net(x), t)
    opt.zero_grad()
    loss.backward()
    adaptive_clip_(body, args.clip)
    opt.step()
    if (step + 1) % 10 == 0:
        with torch.no_grad():
            vx, vy = synth(100, torch.Generator().manual_seed(3))
            acc = (net(vx).argmax(1) == vy).float().mean()
        dist.all_reduce(loss.detach_())
        if rank == 0:
            print(f"step {step + 1} loss {loss / world:.4f} val acc {acc:.3f}")
    if args.save_every and (step + 1) % args.save_every == 0:
        m, o = get_state_dict(net, opt)
        ck = {"net": m, "opt": o, "gen": gen.get_state(), "step": step + 1}
        dcp.save(ck, checkpoint_id=os.path.join(args.out, str(step + 1)))

if args.export:
    full = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True))
    if rank == 0:
        torch.save(full, args.export)
dist.destroy_process_group()
