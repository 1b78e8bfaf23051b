"""Next-symbol model of a noisy machine log with a GRU-like cell written as gated layers over a window."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from cautious import CautiousAdam

SYMBOLS, WINDOW, WIDTH = 16, 6, 32


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.value, self.gate = nn.Linear(width, width), nn.Linear(width, width)
        self.back = nn.Linear(width, width)

    def forward(self, x):
        return x + self.back(torch.tanh(self.value(x)) * torch.sigmoid(self.gate(x)))


class LogModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(SYMBOLS, WIDTH // 2)
        self.join = nn.Linear(WINDOW * WIDTH // 2, WIDTH)
        self.gates = nn.Sequential(Gate(WIDTH), Gate(WIDTH))
        self.out = nn.Linear(WIDTH, SYMBOLS)

    def forward(self, window):
        return self.out(self.gates(self.join(self.table(window).flatten(1))))


def batch(step, size):
    g = torch.Generator().manual_seed(step * 31 + 7)
    window = torch.randint(0, SYMBOLS, (size, WINDOW), generator=g)
    nxt = (window[:, -1] + 2 * (window[:, 0] > 7)) % SYMBOLS
    noise = torch.rand(size, generator=g) < 0.1
    nxt = torch.where(noise, torch.randint(0, SYMBOLS, (size,), generator=g), nxt)
    return window, nxt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=25)
    ap.add_argument("--batch", type=int, default=64)
    ap.add_argument("--lr", type=float, default=4e-3)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("dp",))
    torch.manual_seed(2)
    model = LogModel()
    for gate in model.gates:
        fully_shard(gate, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = CautiousAdam(model.parameters(), group=mesh.get_group("dp"), lr=args.lr, decay=0.01)

    step = 0

    def state():
        weights, moments = get_state_dict(model, optimizer)
        return {"weights": weights, "moments": moments, "step": step}

    if args.resume:
        loaded = state()
        dcp.load(loaded, checkpoint_id=os.path.join(args.resume, sorted(os.listdir(args.resume))[-1]))
        set_state_dict(model, optimizer, model_state_dict=loaded["weights"], optim_state_dict=loaded["moments"])
        step = loaded["step"]
    while step < args.steps:
        window, nxt = (t.chunk(world)[rank] for t in batch(step, args.batch))
        loss = F.cross_entropy(model(window), nxt)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step += 1
        if step % 5 == 0:
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                print(f"{step} loss {shown.item():.5f} agreement {optimizer.agreement:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, f"at_{step:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
