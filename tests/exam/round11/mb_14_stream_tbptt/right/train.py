"""Prediction of the next frame over endless streams: truncated backpropagation, the hidden state lives on from one
optimizer step to the next."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from convgru import Predictor
from streams import BallStreams

STREAMS, LENGTH, STEPS = 8, 5, 18


def gather_streams(hidden):
    """the hidden states of all streams, on all ranks (dim 1 is the stream)"""
    parts = [torch.empty_like(hidden) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, hidden.contiguous())
    return torch.cat(parts, 1)


class StreamTrainer:
    def __init__(self):
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(15)
        self.model = Predictor()
        mesh = init_device_mesh("cpu", (self.world,))
        for cell in self.model.cells:
            # a cell is called once a frame: it stays gathered until the backward pass
            fully_shard(cell, mesh=mesh, reshard_after_forward=False)
        fully_shard(self.model, mesh=mesh)
        self.opt = torch.optim.RMSprop(self.model.parameters(), lr=2e-3, alpha=0.95, momentum=0.5, centered=True)
        self.streams = BallStreams(STREAMS)
        self.per = STREAMS // self.world
        self.mine = slice(self.rank * self.per, (self.rank + 1) * self.per)
        self.hidden = self.model.empty(self.per)
        self.previous = None            # last frame of the chunk before, and its flag
        self.smooth = None
        self.step = 0

    def next_chunk(self):
        frames, begins = self.streams.chunk(LENGTH)
        if self.previous is not None:
            frames = torch.cat([self.previous[0], frames])
            begins = torch.cat([self.previous[1], begins])
        self.previous = frames[-1:].clone(), begins[-1:].clone()
        return frames, begins

    def train_step(self):
        frames, begins = self.next_chunk()
        x, y = frames[:-1, self.mine], frames[1:, self.mine]
        valid = ~begins[1:]             # nothing can be known of the first frame of a video
        pred, hidden = self.model(x, begins[:-1, self.mine], self.hidden)
        error = (pred - y).pow(2).mean((2, 3, 4)) * valid[:, self.mine]
        # all ranks know the flags of all streams, so the count of the whole batch needs no communication
        loss = error.sum() * self.world / valid.sum().clamp(min=1)
        self.opt.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 0.5)
        self.opt.step()
        self.hidden = hidden.detach()
        self.step += 1

        value = loss.detach().clone()
        dist.all_reduce(value)
        value = value.item() / self.world
        self.smooth = value if self.smooth is None else 0.9 * self.smooth + 0.1 * value
        return value

    def state(self):
        m, o = get_state_dict(self.model, self.opt)
        frame = self.previous if self.previous is not None else (torch.zeros(1, STREAMS, 1, 10, 10),
                                                                  torch.zeros(1, STREAMS, dtype=torch.bool))
        return {"model": m, "optim": o, "streams": self.streams.state_dict(), "hidden": gather_streams(self.hidden),
                "frame": frame[0], "flag": frame[1], "smooth": self.smooth or 0.0, "step": self.step}

    def load(self, folder):
        s = self.state()
        dcp.load(s, checkpoint_id=os.path.join(folder, sorted(os.listdir(folder))[-1]))
        set_state_dict(self.model, self.opt, model_state_dict=s["model"], optim_state_dict=s["optim"])
        self.streams.load_state_dict(s["streams"])
        self.hidden = s["hidden"][:, self.mine].clone()
        self.previous = s["frame"], s["flag"]
        self.smooth, self.step = s["smooth"], s["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="streams")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    t = StreamTrainer()
    if args.resume:
        t.load(args.resume)
    while t.step < STEPS:
        value = t.train_step()
        if t.rank == 0:
            print(f"step {t.step} loss {value:.6f} smooth {t.smooth:.6f}")
        if args.save_every and t.step % args.save_every == 0:
            dcp.save(t.state(), checkpoint_id=os.path.join(args.out, f"s{t.step:05d}"))
    if args.export:
        sd = get_model_state_dict(t.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        sd["hidden"] = gather_streams(t.hidden)
        if t.rank == 0:
            torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
