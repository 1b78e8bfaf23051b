import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from corpus import training_batch
from harness import Harness
from tagger import Tagger


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--eval-every", type=int, default=5)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = Tagger()
    for mixer in model.mixers:
        fully_shard(mixer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01, eps=1e-5)
    harness = Harness()

    def state(step):
        weights, optim = get_state_dict(model, optimizer)
        return {"weights": weights, "optim": optim, "step": step}

    step = 0
    if args.resume:
        s = state(0)
        dcp.load(s, checkpoint_id=os.path.join(args.resume, max(os.listdir(args.resume))))
        set_state_dict(model, optimizer, model_state_dict=s["weights"], optim_state_dict=s["optim"])
        step = s["step"]
    while step < args.steps:
        ids, tags = (t.chunk(world)[rank] for t in training_batch(step))
        loss = F.cross_entropy(model(ids).flatten(0, 1), tags.flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % args.eval_every == 0:
            scores = harness(model)
            shown = loss.detach() / world
            dist.all_reduce(shown)
            if rank == 0:
                text = " ".join(f"{k}: nll {v['nll']:.5f} f1 {v['macro_f1']:.4f}" for k, v in scores.items())
                print(f"{step:3d} loss {shown.item():.5f} {text}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(step), checkpoint_id=os.path.join(args.out, f"{step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
