"""Image classification with a small runner: hooks, a message hub, iteration-based checkpoints."""
import argparse
import os
import os.path as osp
import time

import numpy as np
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard


class HistoryBuffer:
    """Values of one scalar over time, with windowed statistics."""

    def __init__(self, max_length=1000):
        self._values = np.zeros(0)
        self._counts = np.zeros(0, dtype=np.int64)
        self.max_length = max_length

    def update(self, value, count=1):
        self._values = np.append(self._values, value)[-self.max_length :]
        self._counts = np.append(self._counts, count)[-self.max_length :]

    def mean(self, window=None):
        window = min(window or len(self._values), len(self._values))
        return float((self._values[-window:] * self._counts[-window:]).sum() / self._counts[-window:].sum())

    def current(self):
        return float(self._values[-1])


class MessageHub:
    def __init__(self):
        self.log_scalars, self.runtime_info = {}, {}

    def update_scalar(self, key, value, count=1):
        self.log_scalars.setdefault(key, HistoryBuffer()).update(value, count)

    def state_dict(self):
        return dict(log_scalars=self.log_scalars, runtime_info=self.runtime_info)

    def load_state_dict(self, state):
        self.log_scalars, self.runtime_info = state["log_scalars"], state["runtime_info"]


class ShapeDataset:
    """12 x 12 grey images of bars, crosses, boxes and diagonals."""

    metainfo = dict(classes=("horizontal", "vertical", "cross", "box", "diagonal", "anti_diagonal"))

    def __init__(self, n, seed):
        rng = np.random.default_rng(seed)
        self.labels = rng.integers(0, len(self.metainfo["classes"]), n)
        self.images = rng.normal(0, 0.3, (n, 1, 12, 12)).astype(np.float32)
        for image, label in zip(self.images[:, 0], self.labels):
            y, x, s = rng.integers(0, 6), rng.integers(0, 6), rng.integers(4, 7)
            box = image[y : y + s, x : x + s]
            if label in (0, 2):
                box[s // 2] += 2
            if label in (1, 2):
                box[:, s // 2] += 2
            if label == 3:
                box[[0, -1]] += 2
                box[1:-1, [0, -1]] += 2
            if label in (4, 5):
                box += 2 * (np.eye(s) if label == 4 else np.eye(s)[::-1]).astype(np.float32)

    def __len__(self):
        return len(self.labels)


class InfiniteSampler:
    """Batch `it` of an endless stream of shuffled epochs; every rank takes its part of the batch."""

    def __init__(self, size, batch_size, seed):
        self.size, self.batch_size, self.seed = size, batch_size, seed
        self.rank, self.world_size = dist.get_rank(), dist.get_world_size()

    def batch(self, it):
        per_epoch = self.size // self.batch_size
        epoch, i = divmod(it, per_epoch)
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return order[i * self.batch_size : (i + 1) * self.batch_size][self.rank :: self.world_size]


class ConvBlock(nn.Sequential):
    def __init__(self, cin, cout):
        super().__init__(nn.Conv2d(cin, cout, 3, padding=1), nn.GroupNorm(4, cout), nn.ReLU(), nn.MaxPool2d(2))


class Classifier(nn.Module):
    def __init__(self, num_classes, width=12):
        super().__init__()
        self.stages = nn.Sequential(ConvBlock(1, width), ConvBlock(width, 2 * width))
        self.fc = nn.Linear(2 * width * 9, num_classes)

    def forward(self, x):
        return self.fc(self.stages(x).flatten(1))


def load_from_local(filename, map_location):
    """Load a checkpoint file of this machine."""
    filename = osp.expanduser(filename)
    if not osp.isfile(filename):
        raise FileNotFoundError(f"{filename} can not be found.")
    checkpoint = torch.load(filename, map_location=map_location, weights_only=False)
    return checkpoint


class LoggerHook:
    def __init__(self, interval):
        self.interval = interval

    def after_train_iter(self, runner):
        if (runner.iter + 1) % self.interval == 0:
            hub, n = runner.message_hub.log_scalars, self.interval
            runner.log(
                f"Iter(train) [{runner.iter + 1}/{runner.max_iters}] lr: {hub['lr'].current():.4e} "
                f"loss: {hub['loss'].current():.6f} ({hub['loss'].mean(n):.6f}) acc: {hub['acc'].mean(n):.4f}"
            )


class CheckpointHook:
    def __init__(self, interval):
        self.interval = interval

    def after_train_iter(self, runner):
        if runner.work_dir and (runner.iter + 1) % self.interval == 0:
            runner.save_checkpoint(f"iter_{runner.iter + 1}.pth")


class Runner:
    def __init__(self, args):
        cuda = torch.cuda.is_available()
        dist.init_process_group("nccl" if cuda else "gloo")
        self.device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
        self.max_iters, self.work_dir, self.seed = args.max_iters, args.work_dir, args.seed
        self.iter = 0
        self.train_set, self.val_set = ShapeDataset(256, args.seed), ShapeDataset(128, args.seed + 1)
        self.sampler = InfiniteSampler(len(self.train_set), args.batch_size, args.seed)
        torch.manual_seed(args.seed)
        self.model = Classifier(len(self.train_set.metainfo["classes"])).to(self.device)
        for stage in self.model.stages:
            fully_shard(stage)
        fully_shard(self.model, reshard_after_forward=True)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4)
        self.scheduler = torch.optim.lr_scheduler.OneCycleLR(self.optimizer, args.lr, total_steps=args.max_iters + 1)
        self.message_hub = MessageHub()
        self.hooks = [LoggerHook(args.log_interval), CheckpointHook(args.ckpt_interval)]

    def log(self, text):
        if dist.get_rank() == 0:
            print(time.strftime("%H:%M:%S"), text, flush=True)

    def save_checkpoint(self, filename):
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        model, optimizer = get_state_dict(self.model, self.optimizer, options=options)
        if dist.get_rank() == 0:
            os.makedirs(self.work_dir, exist_ok=True)
            self.message_hub.runtime_info["last_ckpt"] = filename
            meta = dict(iter=self.iter + 1, seed=self.seed, dataset_meta=self.train_set.metainfo)
            checkpoint = dict(
                meta=meta,
                state_dict=model,
                optimizer=optimizer,
                param_schedulers=self.scheduler.state_dict(),
                message_hub=self.message_hub.state_dict(),
            )
            torch.save(checkpoint, osp.join(self.work_dir, filename))
            self.log(f"Saved checkpoint at {self.iter + 1} iterations")
        dist.barrier()

    def resume(self, filename):
        checkpoint = load_from_local(filename, map_location="cpu")
        set_state_dict(
            self.model,
            self.optimizer,
            model_state_dict=checkpoint["state_dict"],
            optim_state_dict=checkpoint["optimizer"],
            options=StateDictOptions(full_state_dict=True),
        )
        self.scheduler.load_state_dict(checkpoint["param_schedulers"])
        self.message_hub.load_state_dict(checkpoint["message_hub"])
        self.iter = checkpoint["meta"]["iter"]
        self.log(f"resumed from iter: {self.iter}")

    def forward(self, dataset, indices):
        images = torch.from_numpy(dataset.images[indices]).to(self.device)
        labels = torch.from_numpy(dataset.labels[indices]).to(self.device)
        logits = self.model(images)
        return F.cross_entropy(logits, labels), (logits.argmax(1) == labels).float().mean()

    def train(self):
        self.model.train()
        while self.iter < self.max_iters:
            indices = self.sampler.batch(self.iter)
            loss, acc = self.forward(self.train_set, indices)
            self.optimizer.zero_grad()
            loss.backward()
            self.message_hub.update_scalar("lr", self.optimizer.param_groups[0]["lr"])
            self.optimizer.step()
            self.scheduler.step()
            scalars = torch.stack([loss.detach(), acc])
            dist.all_reduce(scalars)
            for key, value in zip(("loss", "acc"), (scalars / dist.get_world_size()).tolist()):
                self.message_hub.update_scalar(key, value, self.sampler.batch_size)
            for hook in self.hooks:
                hook.after_train_iter(self)
            self.iter += 1

    @torch.no_grad()
    def val(self):
        norm = sum(p.full_tensor().double().square().sum().item() for p in self.model.parameters()) ** 0.5
        self.model.eval()
        result = torch.stack(self.forward(self.val_set, np.arange(len(self.val_set))[dist.get_rank() :: dist.get_world_size()]))
        dist.all_reduce(result)
        loss, acc = (result / dist.get_world_size()).tolist()
        mean = self.message_hub.log_scalars["loss"].mean()
        self.log(f"Iter(val) loss: {loss:.6f} acc: {acc:.4f} weight norm: {norm:.6f} mean train loss: {mean:.6f}")


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--work-dir", default=None, help="where checkpoints go (none: no checkpoints)")
    parser.add_argument("--resume", default=None, help="checkpoint file to go on from")
    parser.add_argument("--max-iters", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.03)
    parser.add_argument("--log-interval", type=int, default=5)
    parser.add_argument("--ckpt-interval", type=int, default=6)
    parser.add_argument("--seed", type=int, default=42)
    args = parser.parse_args()

    runner = Runner(args)
    if args.resume:
        runner.resume(args.resume)
    runner.train()
    runner.val()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
