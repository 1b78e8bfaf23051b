import argparse
import json
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict, get_optimizer_state_dict, set_model_state_dict, set_optimizer_state_dict)
from torch.distributed.fsdp import fully_shard

from corpus import VOCAB, sequences
from moe import MoELM


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = MoELM(VOCAB)
        for layer in self.model.layers:
            for expert in layer.moe.experts:
                fully_shard(expert)
            fully_shard(layer)
        fully_shard(self.model)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.01, eps=1e-6)
        self.step = 0

    def state(self):
        return {"model": get_model_state_dict(self.model),
                "optim": get_optimizer_state_dict(self.model, self.optim)}

    def save(self):
        folder = Path(self.args.out) / f"{self.step:06d}"
        dcp.save(self.state(), checkpoint_id=folder)
        if self.rank == 0:
            (Path(self.args.out) / "latest.json").write_text(json.dumps({"step": self.step}))
        dist.barrier()

    def load(self, folder):
        self.step = json.loads((Path(folder) / "latest.json").read_text())["step"]
        state = self.state()
        dcp.load(state, checkpoint_id=Path(folder) / f"{self.step:06d}")
        set_model_state_dict(self.model, state["model"])
        set_optimizer_state_dict(self.model, self.optim, state["optim"])

    def local(self, t):
        per_rank = t.shape[0] // self.world
        return t[self.rank * per_rank:(self.rank + 1) * per_rank]

    def train_step(self):
        ids, targets = sequences(self.step, self.args.batch)
        logits = self.model(self.local(ids))
        loss = F.cross_entropy(logits.flatten(0, 1), self.local(targets).flatten())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optim.step()
        self.optim.zero_grad()
        loads = self.model.update_biases()
        self.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.world, loads

    @torch.no_grad()
    def evaluate(self):
        self.model.eval()
        ids, targets = sequences(10_000, self.args.batch)
        logits = self.model(self.local(ids))
        total = F.cross_entropy(logits.flatten(0, 1), self.local(targets).flatten(), reduction="sum")
        dist.all_reduce(total)
        self.model.train()
        return total.item() / targets.numel()

    def fit(self):
        if self.args.resume:
            self.load(self.args.resume)
        while self.step < self.args.steps:
            loss, loads = self.train_step()
            if self.rank == 0:
                shown = " ".join(f"{int(x):4d}" for x in loads[0])
                print(f"{self.step:3d} loss {loss:.5f}  load of layer 0: {shown}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()
        held_out = self.evaluate()
        if self.rank == 0:
            print(f"held-out loss {held_out:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=26)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--seed", type=int, default=5)
    parser.add_argument("--out", default="")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume", default="")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).fit()
    dist.destroy_process_group()
