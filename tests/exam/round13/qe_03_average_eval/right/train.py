import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ema import WeightAverage
from evaluation import evaluate
from net import ClickNet


def sample(size, seed):
    g = torch.Generator().manual_seed(seed)
    cats = torch.randint(0, 12, (size, 4), generator=g)
    dense = torch.randn(size, 6, generator=g)
    score = torch.sin(cats.float()).sum(1) + dense[:, 0] * dense[:, 1] + 0.5 * dense[:, 2]
    labels = (score + 0.5 * torch.randn(size, generator=g) > 0).long()
    return cats, dense, labels


def everything(model, optimizer, average, step):
    weights, optim = get_state_dict(model, optimizer)
    return {"weights": weights, "optim": optim, "average": average.average, "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--eval-every", type=int, default=6)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    opt = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(17)
    model = ClickNet()
    for block in model.body:
        fully_shard(block)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.015, eps=1e-5, weight_decay=0.01)
    average = WeightAverage(model, decay=0.9)
    holdout = sample(256, seed=999)

    step = 0
    if opt.resume:
        folder = os.path.join(opt.resume, max(d for d in os.listdir(opt.resume) if d.startswith("ck_")))
        state = everything(model, optimizer, average, step)
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optim"])
        step = state["step"]

    while step < opt.steps:
        cats, dense, labels = (t.chunk(world)[rank] for t in sample(64, seed=step))
        loss = F.cross_entropy(model(cats, dense), labels)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        average.update(step)

        if step % opt.eval_every == 0:
            now, _ = evaluate(model, holdout)
            with average:
                averaged, accuracy = evaluate(model, holdout)
            mean = loss.detach() / world
            dist.all_reduce(mean)
            if rank == 0:
                row = dict(step=step, train=round(mean.item(), 5), live=round(now, 5), averaged=round(averaged, 5), accuracy=round(accuracy, 4))
                print(json.dumps(row), flush=True)
                if opt.out:
                    os.makedirs(opt.out, exist_ok=True)
                    with open(os.path.join(opt.out, "metrics.jsonl"), "a") as f:
                        f.write(json.dumps(row) + "\n")
        if opt.save_every and step % opt.save_every == 0:
            dcp.save(everything(model, optimizer, average, step), checkpoint_id=os.path.join(opt.out, f"ck_{step:05d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
