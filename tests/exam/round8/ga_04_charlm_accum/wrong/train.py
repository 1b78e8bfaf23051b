import argparse
import dataclasses
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from corpus import Corpus
from model import CharLM


@dataclasses.dataclass
class Config:
    epochs: int = 6
    micro: int = 8
    accum: int = 4
    lr: float = 4e-3
    save_every: int = 0
    out: str = "ckpt"
    resume: str = ""
    export: str = ""


def parse():
    ap = argparse.ArgumentParser()
    for f in dataclasses.fields(Config):
        ap.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
    return Config(**vars(ap.parse_args()))


def build():
    torch.manual_seed(0)
    model = CharLM()
    for block in model.blocks:
        fully_shard(block)
    fully_shard(model)
    return model


def run_epoch(cfg, epoch, model, opt, corpus):
    rank, world = dist.get_rank(), dist.get_world_size()
    n = corpus.micro_batches(cfg.micro)
    total = torch.zeros(())
    for i, (x, y) in enumerate(corpus.epoch(epoch, cfg.micro, rank, world)):
        first = i - i % cfg.accum
        window = min(cfg.accum, n - first)
        boundary = i == first + window - 1
        model.set_requires_gradient_sync((i + 1) % cfg.accum == 0)
        loss = F.cross_entropy(model(x).flatten(0, 1), y.flatten())
        (loss / window).backward()
        total += loss.detach()
        if boundary:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            opt.step()
            opt.zero_grad()
    dist.all_reduce(total)
    return (total / n / world).item()


def main():
    cfg = parse()
    dist.init_process_group("gloo")
    model, corpus = build(), Corpus()
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
    epoch = 0
    if cfg.resume:
        epoch = max(int(d[5:]) for d in os.listdir(cfg.resume) if d.startswith("epoch"))
        msd, osd = get_state_dict(model, opt)
        state = {"model": msd, "opt": osd}
        dcp.load(state, checkpoint_id=f"{cfg.resume}/epoch{epoch}")
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["opt"])

    while epoch < cfg.epochs:
        loss = run_epoch(cfg, epoch, model, opt, corpus)
        epoch += 1
        if dist.get_rank() == 0:
            print(f"epoch {epoch} loss {loss:.4f}")
        if cfg.save_every and epoch % cfg.save_every == 0:
            msd, osd = get_state_dict(model, opt)
            dcp.save({"model": msd, "opt": osd}, checkpoint_id=f"{cfg.out}/epoch{epoch}")

    if cfg.export:
        full = {k: v.full_tensor() for k, v in model.state_dict().items()}
        if dist.get_rank() == 0:
            torch.save(full, cfg.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
