import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from comparisons import VOCAB, comparisons
from reward import Clipper, RewardModel, shard


def margin_loss(model, chosen, rejected, gap):
    scores = model(torch.cat([chosen, rejected]))
    better, worse = scores.chunk(2)
    return F.softplus(gap - (better - worse)).mean()


def build(args):
    torch.manual_seed(17)
    model = RewardModel(VOCAB)
    clip = Clipper(model, args.max_norm)
    model = shard(model)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    return model, clip, opt


def save(folder, model, opt, step):
    m, o = get_state_dict(model, opt)
    dcp.save({"model": m, "opt": o, "step": torch.tensor(step)}, checkpoint_id=str(folder / f"step_{step:04d}"))


def resume(folder, model, opt):
    last = max(folder.glob("step_*"))
    m, o = get_state_dict(model, opt)
    state = {"model": m, "opt": o, "step": torch.tensor(0)}
    dcp.load(state, checkpoint_id=str(last))
    set_state_dict(model, opt, model_state_dict=m, optim_state_dict=o)
    return int(state["step"])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=18)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--lr", type=float, default=0.1)
    ap.add_argument("--max-norm", type=float, default=0.5)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path)
    ap.add_argument("--resume", type=Path)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    model, clip, opt = build(args)
    start = resume(args.resume, model, opt) if args.resume else 0

    for step in range(start, args.steps):
        mine = [t[rank::world] for t in comparisons(step, args.batch)]
        loss = margin_loss(model, *mine)
        loss.backward()
        clip()
        opt.step()
        opt.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total)
        if rank == 0:
            print(f"{step + 1:3d} loss {total.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            save(args.out, model, opt, step + 1)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
