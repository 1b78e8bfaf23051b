"""Click ranker on the HSDP trainer.   torchrun --nproc_per_node N train.py [--key value ...]"""
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

from feed import ImpressionFeed
from meshes import apply_hsdp, build_mesh
from ranker import ClickRanker
from settings import RankerSettings


def parse(argv):
    cfg = RankerSettings()
    for key, value in zip(argv[::2], argv[1::2]):
        name = key.lstrip("-").replace("-", "_")
        setattr(cfg, name, type(getattr(cfg, name))(value))
    return cfg


def newest(folder):
    steps = [int(n.split("-")[1]) for n in os.listdir(folder) if n.startswith("step-")]
    return os.path.join(folder, f"step-{max(steps)}")


def main():
    cfg = parse(sys.argv[1:])
    dist.init_process_group("gloo")
    mesh = build_mesh()
    torch.manual_seed(cfg.seed)
    model = apply_hsdp(ClickRanker(cfg), mesh)
    optim = torch.optim.AdamW(model.parameters(), lr=cfg.lr, weight_decay=cfg.weight_decay)
    feed = ImpressionFeed(cfg, mesh)

    start = 0
    if cfg.resume:
        m, o = get_state_dict(model, optim)
        state = {"model": m, "optim": o, "step": 0}
        dcp.load(state, checkpoint_id=newest(cfg.resume))
        set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        start = state["step"]

    for step in range(start, cfg.steps):
        fields, clicks = feed(step)
        loss = F.binary_cross_entropy_with_logits(model(fields).squeeze(-1), clicks)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optim.param_groups:
            group["lr"] = cfg.lr * min(1.0, (step + 1) / 5)
        optim.step()
        optim.zero_grad()

        shown = loss.detach().clone()
        dist.all_reduce(shown)
        if dist.get_rank() == 0 and (step % 5 == 0 or step == cfg.steps - 1):
            print(f"step {step:3d}  logloss {shown.item() / dist.get_world_size():.4f}", flush=True)
        if cfg.save_every and (step + 1) % cfg.save_every == 0:
            m, o = get_state_dict(model, optim)
            dcp.save({"model": m, "optim": o, "step": step + 1}, checkpoint_id=os.path.join(cfg.out, f"step-{step + 1}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
