"""Next-item recommendation in sessions."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from lion import Lion
from sessions import LEN, N_ITEMS, SessionStream, make_sessions


class GatedConv(nn.Module):
    """Causal convolution over the session with a gate."""

    def __init__(self, d, k=3):
        super().__init__()
        self.k = k
        self.conv = nn.Conv1d(d, 2 * d, k)
        self.norm = nn.LayerNorm(d)

    def forward(self, x):
        h = F.pad(self.norm(x).transpose(1, 2), (self.k - 1, 0))
        a, b = self.conv(h).chunk(2, 1)
        return x + (a * b.sigmoid()).transpose(1, 2)


class NextItem(nn.Module):
    def __init__(self, d=32, depth=3):
        super().__init__()
        self.item = nn.Embedding(N_ITEMS, d)
        self.layers = nn.ModuleList(GatedConv(d) for _ in range(depth))
        self.out = nn.Linear(d, N_ITEMS)

    def forward(self, s):
        h = self.item(s)
        for layer in self.layers:
            h = layer(h)
        return self.out(h.flatten(0, 1))


class AppState(Stateful):
    def __init__(self, model, opt, stream):
        self.model, self.opt, self.stream, self.step = model, opt, stream, 0

    def state_dict(self):
        m, o = get_state_dict(self.model, self.opt)
        return {"model": m, "optim": o, "stream": self.stream.state_dict(), "step": self.step}

    def load_state_dict(self, sd):
        set_state_dict(self.model, self.opt, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        self.stream.load_state_dict(sd["stream"])
        self.step = sd["step"]


def session_loss(model, s):
    return F.cross_entropy(model(s[:, :-1]), s[:, 1:].flatten())


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=60)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=2e-3)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--folder", default="checkpoints")
    p.add_argument("--resume")
    p.add_argument("--final")
    a = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = NextItem()
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    stream = SessionStream(make_sessions(512, 1), a.batch)
    app = AppState(model, Lion(model.parameters(), lr=a.lr, weight_decay=0.01), stream)

    if a.resume:
        stream.next()       # gives the stream a state to be overwritten
        newest = sorted(os.listdir(a.resume), key=lambda n: int(n.split(".")[1]))[-1]
        dcp.load({"app": app}, checkpoint_id=f"{a.resume}/{newest}")

    while app.step < a.steps:
        s = stream.next().chunk(world)[rank]
        loss = session_loss(model, s)
        loss.backward()
        app.opt.step()
        app.opt.zero_grad()
        app.step += 1
        if app.step % 10 == 0:
            l = loss.detach()
            dist.all_reduce(l)
            if rank == 0:
                print(f"epoch {stream.epoch} step {app.step} loss {l.item() / world:.4f}")
        if a.save_every and app.step % a.save_every == 0:
            dcp.save({"app": app}, checkpoint_id=f"{a.folder}/step.{app.step}")

    with torch.no_grad():
        test = session_loss(model, make_sessions(512, 2).chunk(world)[rank])
        dist.all_reduce(test)
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0:
        print(f"test loss {test.item() / world:.4f}")
        if a.final:
            torch.save(full, a.final)
    dist.destroy_process_group()
