"""The loop is a generator: it yields after each update, and the caller prints, saves or stops."""
import argparse
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict)
from torch.distributed.fsdp import fully_shard

from moe import RegimeModel
from series import lagged, regime_series

MICRO, ACCUM = 16, 2


def updates(model, opt, g, start, stop, rank, world):
    model.train()
    for step in range(start, stop):
        total = torch.zeros(())
        for i in range(ACCUM):
            x, y = lagged(regime_series(MICRO, 24, g).chunk(world)[rank])
            model.set_requires_gradient_sync(i == ACCUM - 1)
            mse = (model(x) - y.flatten(0, 1)).square().mean()
            aux = sum(layer.aux for layer in model.layers)
            ((mse + 0.01 * aux) / ACCUM).backward()
            total += mse.detach() / ACCUM
        opt.step()
        opt.zero_grad()
        load = model.layers[0].load.clone()
        for layer in model.layers:
            layer.adjust_bias(0.005)
        dist.all_reduce(total)
        yield step + 1, total.item() / world, load


class Keeper:
    """Keeps the last two checkpoints."""

    def __init__(self, folder):
        self.folder = Path(folder)

    def list(self):
        return sorted(self.folder.glob("update*"), key=lambda p: int(p.name[6:]))

    def save(self, state, step):
        dcp.save(state, checkpoint_id=self.folder / f"update{step}")
        if dist.get_rank() == 0:
            for old in self.list()[:-2]:
                shutil.rmtree(old)
        dist.barrier()

    def load_newest(self, state):
        dcp.load(state, checkpoint_id=self.list()[-1])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--updates", type=int, default=20)
    ap.add_argument("--keep-in")
    ap.add_argument("--keep-every", type=int, default=4)
    ap.add_argument("--restart-from")
    ap.add_argument("--final-model")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(6)
    model = RegimeModel()
    for layer in model.layers:
        for e in layer.experts:
            fully_shard(e)
        fully_shard(layer)
    fully_shard(model)
    opt = torch.optim.Adamax(model.parameters(), lr=5e-3)
    g = torch.Generator().manual_seed(1)
    start = 0

    def state():
        m, o = get_state_dict(model, opt)
        return {"model": m, "optim": o, "rng": g.get_state(), "step": start}

    if a.restart_from:
        st = state()
        Keeper(a.restart_from).load_newest(st)
        set_state_dict(model, opt, model_state_dict=st["model"], optim_state_dict=st["optim"])
        g.set_state(st["rng"])
        start = st["step"]

    for step, mse, load in updates(model, opt, g, start, a.updates, rank, world):
        if rank == 0 and step % 5 == 0:
            print(f"update {step} mse {mse:.4f} load {[int(v) for v in load]}")
        if a.keep_in and step % a.keep_every == 0 and step < a.updates:
            Keeper(a.keep_in).save({**state(), "step": step}, step)

    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if rank == 0 and a.final_model:
        torch.save(full, a.final_model)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
