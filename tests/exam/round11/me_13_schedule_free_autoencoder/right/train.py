import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from autoencoder import TimeAutoencoder, sensor_windows
from schedulefree import ScheduleFreeAdamW


class Session:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        mesh = init_device_mesh("cpu", (self.world,))
        torch.manual_seed(31)
        self.model = TimeAutoencoder()
        fully_shard(self.model.encode, mesh=mesh)
        fully_shard(self.model.decode, mesh=mesh)
        fully_shard(self.model, mesh=mesh)
        self.params = dict(self.model.named_parameters())
        self.opt = ScheduleFreeAdamW(self.model.parameters(), weight_decay=0.01)
        self.gen = torch.Generator().manual_seed(32)
        self.data, self.val = sensor_windows(512, 1), sensor_windows(128, 2)
        self.step = 0
        self.best = (float("inf"), -1)
        self.best_weights = None

    def mine(self, t):
        return t.chunk(self.world)[self.rank]

    @torch.no_grad()
    def evaluate(self):
        """Validation error of the averaged point x; keeps it when it is the best so far."""
        self.opt.eval()
        x = self.mine(self.val)
        total = F.mse_loss(self.model(x), x, reduction="sum").double()
        dist.all_reduce(total)
        error = total.item() / self.val.numel()
        if error < self.best[0]:
            self.best = (error, self.step)
            self.best_weights = {n: p.to_local().clone() for n, p in self.params.items()}
        # the root still holds gathered copies of x
        self.model.reshard()
        self.opt.train()
        return error

    def train(self):
        while self.step < self.args.steps:
            idx = torch.randint(len(self.data), (32,), generator=self.gen)
            x = self.mine(self.data[idx])
            loss = F.mse_loss(self.model(x), x)
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            self.step += 1
            if self.step % 10 == 0:
                error = self.evaluate()
                if self.rank == 0:
                    print(f"step {self.step} averaged model val {error:.5f}", flush=True)
            if self.args.save_every and self.step % self.args.save_every == 0:
                self.save()

    def save(self):
        folder = os.path.join(self.args.out, f"{self.step:08d}")
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "world": self.world,
                "params": {n: p.to_local() for n, p in self.params.items()},
                "opt": self.opt.state_dict(),
                "gen": self.gen.get_state(),
                "step": self.step,
                "best": self.best,
                "best_weights": self.best_weights,
            },
            os.path.join(folder, f"part{self.rank}.pt"),
        )
        dist.barrier()

    @torch.no_grad()
    def load(self, root):
        folder = os.path.join(root, max(os.listdir(root)))
        saved = torch.load(os.path.join(folder, f"part{self.rank}.pt"), weights_only=False)
        if saved["world"] != self.world:
            raise ValueError(f"written by {saved['world']} ranks, read by {self.world}")
        for n, p in self.params.items():
            p.to_local().copy_(saved["params"][n])
        self.opt.load_state_dict(saved["opt"])
        self.gen.set_state(saved["gen"])
        self.step, self.best, self.best_weights = saved["step"], saved["best"], saved["best_weights"]

    @torch.no_grad()
    def finish(self):
        self.evaluate()
        for n, p in self.params.items():
            p.to_local().copy_(self.best_weights[n])
        if self.rank == 0:
            print(f"kept the average of step {self.best[1]}, val {self.best[0]:.5f}", flush=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=60)
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    session = Session(args)
    if args.resume:
        session.load(args.resume)
    session.train()
    session.finish()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
