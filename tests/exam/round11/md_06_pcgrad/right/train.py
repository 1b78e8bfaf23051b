import argparse
import glob

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from surgery import pcgrad, take_grads
from tasks import TASKS, MultiTaskNet, sensor_batch, task_loss


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(5)
        self.model = MultiTaskNet()
        for block in self.model.trunk:
            fully_shard(block)
        fully_shard(self.model)
        self.params = list(self.model.parameters())
        self.opt = torch.optim.SGD(self.params, lr=0.08, momentum=0.9, nesterov=True)
        self.order = torch.Generator().manual_seed(123)
        self.step = 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.opt)
        return {"model": model, "optim": optim, "order": self.order.get_state(), "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.order.set_state(state["order"])
        self.step = state["step"]

    def train_step(self):
        x, y = sensor_batch(self.step, self.args.batch)
        x = x.chunk(self.world)[self.rank]
        y = {k: v.chunk(self.world)[self.rank] for k, v in y.items()}
        losses, grads = [], []
        for name in TASKS:
            loss = task_loss(name, self.model(x), y)
            loss.backward()
            grads.append(take_grads(self.params))
            losses.append(loss.detach())
        merged, conflicts = pcgrad(grads, self.order)
        for p, g in zip(self.params, merged):
            p.grad = g
        self.opt.step()
        self.opt.zero_grad()
        self.step += 1
        losses = torch.stack(losses)
        dist.all_reduce(losses)
        return (losses / self.world).tolist(), conflicts

    def fit(self):
        while self.step < self.args.steps:
            losses, conflicts = self.train_step()
            if self.rank == 0 and self.step % 3 == 0:
                print(f"{self.step:3d} " + " ".join(f"{n} {v:.4f}" for n, v in zip(TASKS, losses)) + f" conflicts {conflicts}")
            if self.args.save_every and self.step % self.args.save_every == 0:
                dcp.save(self.state_dict(), checkpoint_id=f"{self.args.out}/at{self.step:04d}")


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=15)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="out")
    ap.add_argument("--resume", default="")
    ap.add_argument("--export", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        state = run.state_dict()
        dcp.load(state, checkpoint_id=sorted(glob.glob(f"{args.resume}/at*"))[-1])
        run.load_state_dict(state)
    run.fit()
    if args.export:
        full = {k: v.full_tensor() for k, v in run.model.state_dict().items()}
        if run.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
