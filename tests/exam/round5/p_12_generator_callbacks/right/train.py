import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy

from callbacks import Print, Save, StopAt
from curriculum import TOKENS, VOCAB, feed, length
from net import ShiftLM


def training(model, opt, start, rank, world):
    """Yields one event per finished optimizer step; whoever iterates decides when it ends."""
    for step, ids in feed(start, rank, world):
        for g in opt.param_groups:
            g["lr"] = g["peak"] * min(1.0, (step + 1) / 4) * 0.97 ** step
        logits = model(ids[:, :-1])
        # summed over the local tokens; the reduction over ranks is a sum too (divide factor 1)
        total = cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum")
        (total / TOKENS).backward()
        opt.step()
        opt.zero_grad()
        shown = total.detach().clone()
        dist.all_reduce(shown)
        yield {"step": step + 1, "loss": shown.item() / TOKENS, "length": length(step), "lr": opt.param_groups[0]["lr"]}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=26)
    ap.add_argument("--lr", type=float, default=2e-2)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="gen")
    ap.add_argument("--resume", default=None)
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(1)
    model = ShiftLM(VOCAB)
    for l in model.layers:
        fully_shard(l)
    fully_shard(model)
    for m in (model, *model.layers):
        m.set_gradient_divide_factor(1.0)
        m.set_force_sum_reduction_for_comms(True)  # gloo knows no pre-multiplied sum
    opt = torch.optim.Adamax([{"params": list(model.parameters()), "peak": a.lr}], lr=a.lr)

    def state(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "optim": o, "step": step}

    start = 0
    if a.resume:
        sd = state(0)
        newest = max(d for d in os.listdir(a.resume) if d[0] == "n")
        dcp.load(sd, checkpoint_id=os.path.join(a.resume, newest))
        set_state_dict(model, opt, model_state_dict=sd["model"], optim_state_dict=sd["optim"])
        start = sd["step"]
    callbacks = [Print(), Save(a.save_every, a.out, state), StopAt(a.steps)]
    if start < a.steps:
        for event in training(model, opt, start, rank, world):
            if any([cb(event) for cb in callbacks]):
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
