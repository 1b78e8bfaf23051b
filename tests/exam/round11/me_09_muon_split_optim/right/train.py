import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from lm import LM
from muon import Muon


class Run(Stateful):
    def __init__(self, model, optims, gen):
        self.model, self.optims, self.gen, self.step = model, optims, gen, 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optims)
        return {"model": model, "optim": optim, "gen": self.gen.get_state(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optims, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.gen.set_state(state["gen"])
        self.step = state["step"]


def sentences(n, gen, ctx=20, vocab=40):
    """Arithmetic progressions modulo the vocabulary with a marker token now and then."""
    start = torch.randint(vocab, (n, 1), generator=gen)
    stride = torch.randint(1, 6, (n, 1), generator=gen)
    ids = (start + stride * torch.arange(ctx + 1)) % vocab
    drop = torch.rand(ids.shape, generator=gen) < 0.05
    return ids.masked_fill(drop, 0)


def trapezoid(step, total, warmup=4, cooldown=0.3):
    return min(1.0, (step + 1) / warmup, (total - step) / (cooldown * total))


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=24)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save", help="folder for checkpoints")
    ap.add_argument("--save-every", type=int, default=10)
    ap.add_argument("--resume")
    args = ap.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    mesh = init_device_mesh("cpu", (world,))
    torch.manual_seed(0)
    model = LM()
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)

    hidden = [p for n, p in model.named_parameters() if n.startswith("layers.") and p.ndim == 2]
    other = [p for n, p in model.named_parameters() if not (n.startswith("layers.") and p.ndim == 2)]
    optims = [Muon(hidden, lr=0.02, weight_decay=0.01), torch.optim.AdamW(other, lr=5e-3, weight_decay=0.0, eps=1e-6)]
    base = [[g["lr"] for g in o.param_groups] for o in optims]
    run = Run(model, optims, torch.Generator().manual_seed(8))
    if args.resume:
        newest = max(pathlib.Path(args.resume).glob("*/.metadata"), key=lambda f: int(f.parent.name))
        dcp.load({"run": run}, checkpoint_id=newest.parent)

    while run.step < args.steps:
        factor = trapezoid(run.step, args.steps)
        for o, lrs in zip(optims, base):
            for g, lr in zip(o.param_groups, lrs):
                g["lr"] = lr * factor
        ids = sentences(args.batch, run.gen).chunk(world)[rank]
        loss = F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten())
        loss.backward()
        for o in optims:
            o.step()
            o.zero_grad()
        run.step += 1
        if run.step % 4 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {run.step} loss {mean.item() / world:.4f}", flush=True)
        if args.save and run.step % args.save_every == 0:
            dcp.save({"run": run}, checkpoint_id=pathlib.Path(args.save) / str(run.step))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
