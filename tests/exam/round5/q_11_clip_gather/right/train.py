"""CLIP-style training: the contrast spans the ranks, the clamp of the temperature lives in a step hook."""
import argparse
import math
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from contrast import local_contrastive
from pairs import captions
from towers import TwoTowers


def cosine(step, total, warm=4):
    return (step + 1) / warm if step < warm else 0.5 * (1 + math.cos(math.pi * (step - warm) / (total - warm)))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--lr", type=float, default=5e-3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(0)
    model = TwoTowers()
    for tower in (model.image, model.text):
        for layer in tower.layers:
            fully_shard(layer)
        fully_shard(tower)
    fully_shard(model)

    decay = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim <= 1]
    opt = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], lr=args.lr, eps=1e-5)
    opt.register_step_post_hook(lambda *_: model.log_scale.data.clamp_(max=math.log(100.0)))

    def bundle():
        m, o = get_state_dict(model, opt)
        return {"model": m, "opt": o}

    start = 0
    if args.resume:
        start = max(int(n.rsplit("_", 1)[1]) for n in os.listdir(args.resume))
        state = bundle()
        dcp.load(state, checkpoint_id=os.path.join(args.resume, f"clip_{start}"))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])

    img, txt = captions(160, seed=1)
    vi, vt = captions(64, seed=2)
    for step in range(start, args.steps):
        for g in opt.param_groups:
            g["lr"] = args.lr * cosine(step, args.steps)
        idx = torch.randperm(len(img), generator=torch.Generator().manual_seed(step))[: args.batch].chunk(world)[rank]
        loss = local_contrastive(*model(img[idx], txt[idx]))
        opt.zero_grad()
        loss.backward()
        opt.step()
        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if rank == 0 and step % 5 == 4:
            print(f"step {step + 1} loss {shown.item() / world:.4f}", flush=True)
        if args.save_every and (step + 1) % args.save_every == 0:
            dcp.save(bundle(), checkpoint_id=os.path.join(args.out, f"clip_{step + 1}"))

    model.eval()
    with torch.no_grad():
        a, b, _ = model(vi, vt)
        hit = ((a @ b.t()).argmax(1) == torch.arange(len(a))).float().mean()
    if rank == 0:
        print(f"retrieval@1 over 64 pairs {hit.item():.3f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
