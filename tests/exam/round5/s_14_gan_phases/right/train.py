import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from nets import critic, generator
from phases import critic_loss, generator_loss, latent, phases, real

ap = argparse.ArgumentParser()
ap.add_argument("--ticks", type=int, default=39)
ap.add_argument("--batch", type=int, default=32)
ap.add_argument("--save-every", type=int, default=0)
ap.add_argument("--out", default="gan")
ap.add_argument("--resume")
ap.add_argument("--export")
args = ap.parse_args()


def shard(net):
    for m in net:
        if isinstance(m, nn.Linear):
            fully_shard(m)
    return fully_shard(net)


dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(6)
gen, cri = generator(), critic()
shard(gen), shard(cri)
sides = {"G": (gen, torch.optim.Adam(gen.parameters(), lr=4e-3, betas=(0.5, 0.99))),
         "C": (cri, torch.optim.Adam(cri.parameters(), lr=4e-3, betas=(0.5, 0.99)))}


def snapshot():
    out = {}
    for k, (net, opt) in sides.items():
        out[k + "_net"], out[k + "_opt"] = get_state_dict(net, opt)
    return out


begin = 0
if args.resume:
    begin = max(int(n) for n in os.listdir(args.resume))
    snap = snapshot()
    dcp.load(snap, checkpoint_id=os.path.join(args.resume, str(begin)))
    for k, (net, opt) in sides.items():
        set_state_dict(net, opt, model_state_dict=snap[k + "_net"], optim_state_dict=snap[k + "_opt"])

for tick, who in phases(begin):
    if tick == args.ticks:
        break
    z = latent(tick, args.batch).chunk(world)[rank]
    cri.requires_grad_(who == "C")  # the generator's pass through the critic leaves no gradients there
    if who == "C":
        loss = critic_loss(gen, cri, real(tick, args.batch).chunk(world)[rank], z)
    else:
        loss = generator_loss(gen, cri, z)
    loss.backward()
    opt = sides[who][1]
    opt.step()
    opt.zero_grad()
    dist.all_reduce(shown := loss.detach() / world)
    if rank == 0 and tick % 3:
        print(f"tick {tick} {who} {shown.item():.4f}", flush=True)
    if args.save_every and (tick + 1) % args.save_every == 0:
        cri.requires_grad_(True)
        dcp.save(snapshot(), checkpoint_id=os.path.join(args.out, str(tick + 1)))

full = {}
for k, (net, _) in sides.items():
    sd = get_model_state_dict(net, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    full.update({f"{k}.{n}": t for n, t in sd.items()})
if rank == 0 and args.export:
    torch.save(full, args.export)
dist.destroy_process_group()
