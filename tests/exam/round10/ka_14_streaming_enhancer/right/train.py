"""Truncated back-propagation through time over parallel streams; the recurrent state outlives the batch."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from enhancer import Enhancer
from streams import NoisyStreams

STREAMS, CHUNK, STEPS = 8, 12, 20


def gather_streams(state):
    """State of all streams in stream order: rank r holds a run of neighbouring streams."""
    parts = [torch.empty_like(state) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, state.contiguous())
    return torch.cat(parts)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(15)
    model = Enhancer()
    for cell in model.cells:
        fully_shard(cell)
    fully_shard(model)
    opt = torch.optim.RMSprop(model.parameters(), lr=2e-3, momentum=0.5, centered=True)

    mine = torch.arange(STREAMS).chunk(world)[rank]
    streams = NoisyStreams(mine.tolist(), CHUNK)
    carried = model.initial(len(mine))
    best, step = float("inf"), 0

    def snapshot():
        weights, optim = get_state_dict(model, opt)
        extra = {"carried": gather_streams(carried), "best": best, "step": step}
        return {"weights": weights, "optim": optim, "extra": extra}

    if args.resume:
        newest = max((n for n in os.listdir(args.resume) if n.startswith("chunk")), key=lambda n: int(n[5:]))
        loaded = snapshot()
        dcp.load(loaded, checkpoint_id=os.path.join(args.resume, newest))
        set_state_dict(model, opt, model_state_dict=loaded["weights"], optim_state_dict=loaded["optim"])
        carried = loaded["extra"]["carried"][mine].clone()
        best, step = loaded["extra"]["best"], loaded["extra"]["step"]

    while step < STEPS:
        noisy, clean, fresh = streams.at(step)
        carried = torch.where(fresh[:, None, None, None], 0.0, carried)
        estimate, after = model(noisy, carried)
        loss = (estimate - clean).square().mean()
        loss.backward()
        torch.nn.utils.clip_grad_value_(model.parameters(), 0.05)
        opt.step()
        opt.zero_grad()
        carried = after.detach()
        step += 1
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        best = min(best, shown.item() / world)
        if rank == 0:
            print(f"chunk {step} mse {shown.item() / world:.5f} best {best:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(snapshot(), checkpoint_id=os.path.join(args.out, f"chunk{step}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
