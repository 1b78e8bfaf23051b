import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)
from torch.distributed.fsdp import fully_shard

from cosmos import make_box, split_sizes
from exchange import SumOver
from model import GalaxyNet


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(8)

    feats, near, rel, target, train = make_box()
    sizes = split_sizes(len(feats), world)
    begin = sum(sizes[:rank])
    mine = slice(begin, begin + sizes[rank])
    feats, near, rel, target = feats[mine], near[mine], rel[mine], target[mine]
    n_train, n_test = train.sum().item(), (~train).sum().item()
    train = train[mine].float()

    model = GalaxyNet()
    for c in model.convs:
        fully_shard(c)
    fully_shard(model)
    opt = torch.optim.AdamW(model.parameters(), lr=5e-3, eps=1e-5)

    start = 0
    if args.resume:
        start = max(int(d.split("-")[-1]) for d in os.listdir(args.resume))
        m, o = get_state_dict(model, opt)
        state = {"m": m, "o": o}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"box-{start}"))
        set_state_dict(model, opt, model_state_dict=state["m"], optim_state_dict=state["o"])

    for step in range(start, args.steps):
        err = (model(feats, near, rel, sizes).squeeze(-1) - target).square()
        mse = SumOver.apply((err * train).sum()) / n_train
        # log of the mean error over the whole box: not a sum over nodes, so the reduction comes before it
        loss = mse.log1p()
        # each rank holds only its own nodes' part of the gradient: undo FSDP's mean over the ranks
        (loss * world).backward()
        opt.step()
        opt.zero_grad()
        test = (err.detach() * (1 - train)).sum()
        dist.all_reduce(test)
        if rank == 0 and (step + 1) % 6 == 0:
            print(f"step {step + 1} loss {loss.item():.5f} test mse {test.item() / n_test:.5f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"m": m, "o": o}, checkpoint_id=os.path.join(args.out, f"box-{step + 1}"))

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and rank == 0:
        torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
