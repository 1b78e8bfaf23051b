import argparse
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from ema import EMA
from task import Classifier, samples


@torch.no_grad()
def validate(model, rank, world):
    x, y = samples(10**6, 256)
    x, y = x.chunk(world)[rank], y.chunk(world)[rank]
    model.eval()
    hits = (model(x).argmax(-1) == y).sum()
    model.train()
    dist.all_reduce(hits)
    return hits.item() / 256


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=36)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=4)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", type=Path, default=Path("ckpt"))
    ap.add_argument("--resume", type=Path)
    ap.add_argument("--export")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Classifier()
    fully_shard(model.body)
    fully_shard(model, reshard_after_forward=True)
    opt = torch.optim.AdamW(model.parameters(), lr=6e-3)
    ema = EMA(model)

    def bundle(step):
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o, "ema": ema.state_dict(model), "step": step}

    step = 0
    if args.resume:
        newest = max(args.resume.iterdir(), key=lambda p: int(p.stem[1:]))
        state = bundle(0)
        dcp.load(state, checkpoint_id=newest)  # the EMA tensors are filled in place
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        step = state["step"]

    while step < args.steps:
        x, y = samples(step, args.batch)
        loss = F.cross_entropy(model(x.chunk(world)[rank]), y.chunk(world)[rank])
        loss.backward()
        opt.step()
        opt.zero_grad()
        ema.update(model)
        step += 1
        if step % args.eval_every == 0:
            with ema.applied(model):
                acc = validate(model, rank, world)
            dist.all_reduce(mean := loss.detach().clone())
            if rank == 0:
                print(f"step {step} train loss {mean.item() / world:.4f} ema val acc {acc:.3f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(bundle(step), checkpoint_id=args.out / f"s{step}")

    sd = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and args.export:
        torch.save(sd, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
