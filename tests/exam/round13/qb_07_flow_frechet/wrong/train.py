import argparse
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from frechet import Features, distance, fit
from images import evaluation_set, training_batch
from velocity import Velocity, sample


class FlowMatching:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(2)
        self.net = Velocity()
        for layer in self.net.layers:
            fully_shard(layer)
        fully_shard(self.net, reshard_after_forward=True)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=6e-3)
        self.features = Features(36)
        self.step = 0

    def mine(self, tensors):
        return [t.chunk(self.world)[self.rank] for t in tensors]

    def state(self):
        net, opt = get_state_dict(self.net, self.opt)
        return {"net": net, "opt": opt, "step": torch.tensor(self.step)}

    def save(self, folder):
        dcp.save(self.state(), checkpoint_id=os.path.join(folder, "flow"))

    def load(self, folder):
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, "flow"))
        set_state_dict(self.net, self.opt, model_state_dict=state["net"], optim_state_dict=state["opt"])
        self.step = int(state["step"])

    def evaluate(self):
        x, z, y = self.mine(evaluation_set())
        return distance(fit(self.features(x)), fit(self.features(sample(self.net, z, y))))

    def log(self, **entry):
        if self.rank == 0:
            print(" ".join(f"{k} {v:.5g}" for k, v in entry.items()), flush=True)
            if self.args.out:
                with open(os.path.join(self.args.out, "metrics.jsonl"), "a") as f:
                    f.write(json.dumps(entry) + "\n")

    def fit(self):
        while self.step < self.args.steps:
            x1, x0, t, y = self.mine(training_batch(self.step, 32))
            xt = (1 - t[:, None]) * x0 + t[:, None] * x1
            loss = (self.net(xt, t, y) - (x1 - x0)).square().mean()
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            if self.step % 10 == 0:
                shown = loss.detach().clone()
                dist.all_reduce(shown)
                self.log(step=self.step, loss=shown.item() / self.world, frechet=self.evaluate())
            if self.step == self.args.save_at:
                self.save(self.args.out)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=30)
    ap.add_argument("--save-at", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    job = FlowMatching(args)
    if args.resume:
        job.load(args.resume)
    job.fit()
    dist.destroy_process_group()
