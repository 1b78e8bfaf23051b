import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from data import epoch_batches, molecules
from loop import run_epoch
from model import make_model

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=12)
parser.add_argument("--micro", type=int, default=16)
parser.add_argument("--accum", type=int, default=4)
parser.add_argument("--out")
parser.add_argument("--save-every", type=int, default=5, help="epochs")
parser.add_argument("--resume")
opts = parser.parse_args()

dist.init_process_group("gloo")
rank, world = dist.get_rank(), dist.get_world_size()
torch.manual_seed(21)
model = make_model(init_device_mesh("cpu", (world,)))
opt = torch.optim.AdamW(model.parameters(), lr=3e-3)
x, y = molecules(160, seed=8)

epoch = 0
if opts.resume:
    epoch = max(int(d) for d in os.listdir(opts.resume))
    model_sd, opt_sd = get_state_dict(model, opt)
    dcp.load({"model": model_sd, "opt": opt_sd}, checkpoint_id=os.path.join(opts.resume, str(epoch)))
    set_state_dict(model, opt, model_state_dict=model_sd, optim_state_dict=opt_sd)

while epoch < opts.epochs:
    batches = epoch_batches(x, y, epoch, opts.micro, rank, world)
    losses = torch.tensor(run_epoch(model, opt, batches, opts.accum))
    dist.all_reduce(losses)
    epoch += 1
    if rank == 0:
        print(f"epoch {epoch} steps {len(losses)} loss {losses.mean().item() / world:.5f}", flush=True)
    if opts.out and epoch % opts.save_every == 0:
        model_sd, opt_sd = get_state_dict(model, opt)
        dcp.save({"model": model_sd, "opt": opt_sd}, checkpoint_id=os.path.join(opts.out, str(epoch)))
dist.destroy_process_group()
