"""VQ-VAE with an EMA codebook; a validation pass every few steps drives a plateau schedule."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from vq import EmaCodebook

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)


class VQVAE(nn.Module):
    def __init__(self, dim=16, width=32, latent=6, codes=12):
        super().__init__()
        self.enc = nn.Sequential(nn.Linear(dim, width), nn.SiLU(), nn.Linear(width, latent))
        self.book = EmaCodebook(codes, latent)
        self.dec = nn.Sequential(nn.Linear(latent, width), nn.SiLU(), nn.Linear(width, dim))

    def forward(self, x):
        q, commit, idx = self.book(self.enc(x))
        return self.dec(q), commit, idx


def draw(n, seed):
    proto = 1.5 * torch.randn(9, 16, generator=torch.Generator().manual_seed(25))
    g = torch.Generator().manual_seed(seed)
    return proto[torch.randint(9, (n,), generator=g)] + 0.2 * torch.randn(n, 16, generator=g)


def training(args, model, opt, plateau, state):
    """Generator over the training steps; yields (step, global loss)."""
    rank, world = dist.get_rank(), dist.get_world_size()
    while state["step"] < args.steps:
        x = draw(args.batch, state["step"]).chunk(world)[rank]
        rec, commit, _ = model(x)
        loss = (rec - x).pow(2).mean() + 0.25 * commit
        opt.zero_grad()
        loss.backward()
        opt.step()
        model.book.update(state["gen"])
        state["step"] += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if state["step"] % args.eval_every == 0:
            plateau.step(validate(model))
        yield state["step"], mean.item()


@torch.no_grad()
def validate(model):
    rank, world = dist.get_rank(), dist.get_world_size()
    x = draw(50, 10**6).tensor_split(world)[rank]  # 50 rows: the parts may differ in length
    model.eval()
    err = (model(x)[0] - x).double().pow(2).sum()
    model.train()
    dist.all_reduce(err)
    return round(err.item() / (50 * 16), 6)


def save(args, model, opt, plateau, state):
    m, o = get_state_dict(model, opt, options=FULL)
    if dist.get_rank() == 0:
        os.makedirs(args.out, exist_ok=True)
        path = os.path.join(args.out, f"vq_{state['step']}.pt")
        torch.save({"model": m, "opt": o, "plateau": plateau.state_dict(), "step": state["step"],
                    "gen": state["gen"].get_state()}, path + ".tmp")
        os.replace(path + ".tmp", path)
    dist.barrier()


def load(folder, model, opt, plateau, state):
    files = [f for f in os.listdir(folder) if f.endswith(".pt")]
    ck = torch.load(os.path.join(folder, max(files, key=lambda f: int(f[3:-3]))), weights_only=False)
    set_state_dict(model, opt, model_state_dict=ck["model"], optim_state_dict=ck["opt"],
                   options=StateDictOptions(full_state_dict=True))
    plateau.load_state_dict(ck["plateau"])
    state["gen"].set_state(ck["gen"])
    state["step"] = ck["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--eval-every", type=int, default=3)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="ckpt")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(19)
    model = VQVAE()
    fully_shard(model.enc)
    fully_shard(model.dec)
    fully_shard(model)
    opt = torch.optim.Adam(model.parameters(), lr=6e-3, eps=1e-6)
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(opt, factor=0.5, patience=1, threshold=0.05)
    state = {"step": 0, "gen": torch.Generator().manual_seed(88)}
    if args.resume:
        load(args.resume, model, opt, plateau, state)

    for step, loss in training(args, model, opt, plateau, state):
        if dist.get_rank() == 0 and step % 6 == 0:
            print(f"step {step} loss {loss:.4f} val {plateau.best:.4f} lr {opt.param_groups[0]['lr']:.2e} revived {model.book.revived.item()}")
        if args.save_every and step % args.save_every == 0:
            save(args, model, opt, plateau, state)

    if args.export:
        full, _ = get_state_dict(model, opt, options=FULL)
        if dist.get_rank() == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
