"""Preference training with a reference that follows the policy.

Two references are kept: a slow one (moved a little after every step) used in the margin, and an anchor that is replaced by
the slow one every `anchor_every` steps and used in a penalty. The NLL term is per answer token of the whole global batch.
"""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict

import pairs
from nets import sharded_lm

HP = dict(steps=14, batch=16, lr=6e-3, beta=0.25, follow=0.1, anchor_every=5, nll=0.5, anchor=0.02)


def total(value):
    value = value.clone()
    dist.all_reduce(value)
    return value


@torch.no_grad()
def move(target, source, weight):
    for t, s in zip(target.parameters(), source.parameters(), strict=True):
        t.lerp_(s, weight)


def steps(policy, slow, anchor, opt, first):
    """Yields (step, global loss) after every optimizer step."""
    rank, world = dist.get_rank(), dist.get_world_size()
    for step in range(first, HP["steps"]):
        chosen, rejected, spans = (t.chunk(world)[rank] for t in pairs.draw(step, HP["batch"]))
        mc, mr = pairs.answer_masks(spans)
        ids, mask = torch.cat([chosen, rejected]), torch.cat([mc, mr])
        with torch.no_grad():
            slow_c, slow_r = slow(ids, mask).chunk(2)
            anchor_c, _ = anchor(ids, mask).chunk(2)
        c, r = policy(ids, mask).chunk(2)
        margin = HP["beta"] * ((c - slow_c) - (r - slow_r))
        tokens = total(mc.sum())
        per_pair = -F.logsigmoid(margin) + HP["anchor"] * F.relu(anchor_c - c)
        # sums over the global batch; the mean over the ranks is taken by the gradient reduction
        loss = world * (per_pair.sum() / HP["batch"] - HP["nll"] * c.sum() / tokens)
        loss.backward()
        opt.step()
        opt.zero_grad()
        move(slow, policy, HP["follow"])
        if (step + 1) % HP["anchor_every"] == 0:
            move(anchor, slow, 1.0)
        yield step + 1, total(loss.detach()).item() / world


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    nets = {name: sharded_lm(seed=8) for name in ("policy", "slow", "anchor")}
    for name in ("slow", "anchor"):
        nets[name].requires_grad_(False)
    opt = torch.optim.NAdam(nets["policy"].parameters(), lr=HP["lr"])

    def state():
        return {**{n: get_model_state_dict(m) for n, m in nets.items()}, "opt": get_optimizer_state_dict(nets["policy"], opt)}

    first = 0
    if args.resume:
        first = max(int(n) for n in os.listdir(args.resume))
        loaded = state()
        dcp.load(loaded, checkpoint_id=os.path.join(args.resume, str(first)))
        for n, m in nets.items():
            set_model_state_dict(m, loaded[n])
        set_optimizer_state_dict(nets["policy"], opt, loaded["opt"])

    for step, loss in steps(nets["policy"], nets["slow"], nets["anchor"], opt, first):
        if dist.get_rank() == 0:
            print(f"step {step} loss {loss:.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(state(), checkpoint_id=os.path.join(args.out, str(step)))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
