"""Click-through-rate model trained on a log that is read once, in passes.

Every "epoch" consumes the next stretch of the click log; nothing is read twice.

    torchrun --nproc-per-node 2 train.py
    torchrun --nproc-per-node 2 train.py --ckpt-dir /tmp/ctr --save-every 1 --epochs 3
    torchrun --nproc-per-node 2 train.py --ckpt-dir /tmp/ctr --resume
"""

import argparse
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, IterableDataset

FIELDS, BUCKETS, DIM = 6, 40, 8
BATCH = 32
BATCHES_PER_EPOCH = 6


class ClickLog(IterableDataset):
    """Hands out the next stretch of the log each time it is iterated."""

    def __init__(self, rank, world, seed=11):
        self.rank, self.world = rank, world
        self.seed = seed
        self.offset = 0
        g = torch.Generator().manual_seed(seed)
        self.effects = torch.randn(FIELDS, BUCKETS, generator=g)

    def _batch(self, index):
        g = torch.Generator().manual_seed(self.seed * 1000 + index)
        ids = torch.randint(BUCKETS, (BATCH, FIELDS), generator=g)
        drift = 0.02 * index
        score = self.effects.gather(1, ids.T).sum(0) * 0.8 - 0.5 + drift
        clicks = (torch.rand(BATCH, generator=g) < torch.sigmoid(score)).float()
        own = slice(self.rank * BATCH // self.world, (self.rank + 1) * BATCH // self.world)
        return ids[own], clicks[own]

    def __iter__(self):
        start = self.offset
        self.offset += BATCHES_PER_EPOCH
        return (self._batch(start + i) for i in range(BATCHES_PER_EPOCH))


class Fetcher:
    """Reads one batch ahead so that the last batch of an epoch is known."""

    def __init__(self, loader):
        self.loader = loader
        self.source = None

    def __iter__(self):
        self.source = iter(self.loader)
        self.ahead = next(self.source, None)
        return self

    def __next__(self):
        if self.ahead is None:
            raise StopIteration
        batch, self.ahead = self.ahead, next(self.source, None)
        return batch, self.ahead is None


class Tower(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class CTRModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.tables = nn.Embedding(FIELDS * BUCKETS, DIM)
        self.register_buffer("shift", torch.arange(FIELDS) * BUCKETS)
        self.towers = nn.ModuleList(Tower(FIELDS * DIM) for _ in range(2))
        self.out = nn.Linear(FIELDS * DIM, 1)

    def forward(self, ids):
        x = self.tables(ids + self.shift).flatten(1)
        for tower in self.towers:
            x = tower(x)
        return self.out(x)


class Trainer:
    def __init__(self, model, optimizer, scheduler, dataset, device, args):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler
        self.dataset, self.device, self.args = dataset, device, args
        self.epoch = 0
        self.step = 0
        self.restored = False
        self.rank, self.world = dist.get_rank(), dist.get_world_size()

    def log(self, text):
        if self.rank == 0:
            print(text, flush=True)

    # ---- checkpoints -------------------------------------------------

    def _state(self):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        return {
            "model": model_sd,
            "optimizer": optim_sd,
            "scheduler": self.scheduler.state_dict(),
            "loop": {"epoch": self.epoch, "step": self.step, "offset": self.dataset.offset},
        }

    def save_checkpoint(self):
        dcp.save(self._state(), checkpoint_id=Path(self.args.ckpt_dir) / "last")
        self.log(f"epoch {self.epoch}: checkpoint written")

    def load_checkpoint(self):
        state = self._state()
        dcp.load(state, checkpoint_id=Path(self.args.ckpt_dir) / "last")
        set_state_dict(
            self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
        )
        self.scheduler.load_state_dict(state["scheduler"])
        self.epoch, self.step = state["loop"]["epoch"], state["loop"]["step"]
        self.dataset.offset = state["loop"]["offset"]
        self.restored = True

    # ---- loops -------------------------------------------------------

    def setup_data(self):
        loader = DataLoader(self.dataset, batch_size=None)
        self.fetcher = Fetcher(loader)
        iter(self.fetcher)

    def training_step(self, ids, clicks):
        loss = nn.functional.binary_cross_entropy_with_logits(self.model(ids)[:, 0], clicks)
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.scheduler.step()
        self.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        return mean.item() / self.world

    def run_epoch(self):
        # setup_data() opened the first stretch
        if self.epoch > 0 and not self.restored:
            iter(self.fetcher)
        self.restored = False
        is_last, total, count = False, 0.0, 0
        while not is_last:
            (ids, clicks), is_last = next(self.fetcher)
            loss = self.training_step(ids.to(self.device), clicks.to(self.device))
            total, count = total + loss, count + 1
            self.log(f"step {self.step} loss {loss:.6f}")
        self.epoch += 1
        self.log(f"epoch {self.epoch}: mean loss {total / count:.6f} lr {self.scheduler.get_last_lr()[0]:.5f}")

    def fit(self):
        if self.args.resume:
            self.load_checkpoint()
        self.setup_data()
        while self.epoch < self.args.epochs:
            self.run_epoch()
            if self.args.ckpt_dir and self.args.save_every and self.epoch % self.args.save_every == 0:
                self.save_checkpoint()
        norm = sum(p.full_tensor().square().sum() for p in self.model.parameters()).sqrt()
        self.log(f"done after {self.step} steps, parameter norm {norm.item():.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--lr", type=float, default=5e-3)
    parser.add_argument("--ckpt-dir", default=None)
    parser.add_argument("--save-every", type=int, default=0, help="epochs between checkpoints")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    if torch.cuda.is_available():
        device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
        dist.init_process_group("nccl")
    else:
        device = torch.device("cpu")
        dist.init_process_group("gloo")

    torch.manual_seed(0)
    model = CTRModel().to(device)
    for tower in model.towers:
        fully_shard(tower)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=6 * BATCHES_PER_EPOCH)

    dataset = ClickLog(dist.get_rank(), dist.get_world_size())
    Trainer(model, optimizer, scheduler, dataset, device, args).fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
