import argparse
import json
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from net import LoadForecaster
from series import Archive


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.archive = Archive()
        torch.manual_seed(args.seed)
        self.model = LoadForecaster()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32, cast_forward_inputs=False)
        for block in self.model.blocks:
            fully_shard(block, mp_policy=policy)
        fully_shard(self.model, mp_policy=policy)
        self.optim = torch.optim.AdamW(self.model.parameters(), lr=args.lr)
        self.sched = torch.optim.lr_scheduler.OneCycleLR(self.optim, args.lr, total_steps=args.steps)
        self.gen = torch.Generator().manual_seed(args.seed + 1)
        self.step = 0

    def mine(self, starts):
        return starts.tensor_split(self.world)[self.rank]

    def train(self):
        while self.step < self.args.steps:
            past, hours, target = self.archive.windows(self.mine(self.archive.train_starts(self.args.batch, self.gen)))
            loss = (self.model(past, hours) - target).square().mean()
            loss.backward()
            self.optim.step()
            self.sched.step()
            self.optim.zero_grad()
            self.step += 1
            if self.step % 10 == 0:
                test = self.evaluate()
                if self.rank == 0:
                    print(f"step {self.step:4d}  train {loss.item():.4f}  test mse {test:.4f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    @torch.no_grad()
    def evaluate(self):
        starts = self.mine(self.archive.test_starts(128))
        past, hours, target = self.archive.windows(starts)
        acc = torch.tensor([(self.model(past, hours) - target).square().sum(), target.numel()], dtype=torch.float64)
        dist.all_reduce(acc)
        return (acc[0] / acc[1]).item()

    def state(self):
        model, optim = get_state_dict(self.model, self.optim)
        return {"model": model, "optim": optim, "sched": self.sched.state_dict(), "gen": self.gen.get_state(), "step": self.step}

    def save(self):
        folder = pathlib.Path(self.args.out)
        dcp.save(self.state(), checkpoint_id=folder / f"it{self.step:06d}")
        if self.rank == 0:
            (folder / "latest.json").write_text(json.dumps({"name": f"it{self.step:06d}"}))
        dist.barrier()

    def load(self, folder):
        folder = pathlib.Path(folder)
        name = json.loads((folder / "latest.json").read_text())["name"]
        state = self.state()
        dcp.load(state, checkpoint_id=folder / name)
        set_state_dict(self.model, self.optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.sched.load_state_dict(state["sched"])
        self.gen.set_state(state["gen"])
        self.step = state["step"]

    def export(self, path):
        full = get_model_state_dict(self.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank == 0:
            torch.save(full, path)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=30)
    p.add_argument("--batch", type=int, default=32)
    p.add_argument("--lr", type=float, default=1e-2)
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="runs")
    p.add_argument("--resume")
    p.add_argument("--export")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.train()
    if args.export:
        trainer.export(args.export)
    dist.destroy_process_group()
