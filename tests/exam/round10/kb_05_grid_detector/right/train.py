import argparse
import pathlib

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.optim.lr_scheduler import LinearLR, MultiStepLR, SequentialLR

from detector import Detector, focal_loss
from scenes import make_scenes


class Criterion:
    """Focal + box loss, both divided by the number of boxes in the batch."""

    def __init__(self, box_weight=2.0):
        self.box_weight = box_weight

    def __call__(self, outputs, cls_target, box_target):
        logits, boxes = outputs
        positive = cls_target.sum(1, keepdim=True)
        num_boxes = positive.sum()
        dist.all_reduce(num_boxes)
        num_boxes = torch.clamp(num_boxes / dist.get_world_size(), min=1.0)
        loss_cls = focal_loss(logits, cls_target) / num_boxes
        loss_box = (F.smooth_l1_loss(boxes, box_target, reduction="none") * positive).sum() / num_boxes
        return {"cls": loss_cls, "box": self.box_weight * loss_box}


class Checkpointer:
    def __init__(self, model, optimizer, scheduler):
        self.model, self.optimizer, self.scheduler = model, optimizer, scheduler

    def _state(self, it):
        m, o = get_state_dict(self.model, self.optimizer)
        return {"model": m, "optimizer": o, "scheduler": self.scheduler.state_dict(), "iteration": it}

    def save(self, folder, it):
        dcp.save(self._state(it), checkpoint_id=str(pathlib.Path(folder) / f"iter_{it}"))

    def load_latest(self, folder):
        latest = max(pathlib.Path(folder).glob("iter_*"), key=lambda p: int(p.name.split("_")[1]))
        state = self._state(0)
        dcp.load(state, checkpoint_id=str(latest))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        self.scheduler.load_state_dict(state["scheduler"])
        return state["iteration"]


def batches(n, batch, seed, start):
    """Endless index batches, the same on all ranks; skips the first `start` ones."""
    g = torch.Generator().manual_seed(seed)
    it = 0
    while True:
        for idx in torch.randperm(n, generator=g)[: n - n % batch].split(batch):
            if it >= start:
                yield idx
            it += 1


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--iters", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.015)
    parser.add_argument("--save-period", type=int, default=0)
    parser.add_argument("--output", default="output")
    parser.add_argument("--resume", action="store_true")
    args = parser.parse_args()

    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(3)
    model = Detector()
    for stage in model.stages:
        fully_shard(stage)
    fully_shard(model)
    decay = [p for n, p in model.named_parameters() if p.ndim > 1]
    no_decay = [p for n, p in model.named_parameters() if p.ndim <= 1]
    optimizer = torch.optim.SGD([{"params": decay, "weight_decay": 1e-4}, {"params": no_decay, "weight_decay": 0.0}],
                                lr=args.lr, momentum=0.9)
    scheduler = SequentialLR(optimizer, [LinearLR(optimizer, 0.1, total_iters=5),
                                         MultiStepLR(optimizer, [args.iters * 2 // 3 - 5], gamma=0.1)], milestones=[5])
    images, cls, box = make_scenes(160, seed=3)
    criterion = Criterion()
    checkpointer = Checkpointer(model, optimizer, scheduler)
    it = checkpointer.load_latest(args.output) if args.resume else 0

    for idx in batches(len(images), args.batch, seed=4, start=it):
        idx = idx.chunk(world)[rank]
        losses = criterion(model(images[idx]), cls[idx], box[idx])
        sum(losses.values()).backward()
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)
        it += 1
        log = torch.stack([losses["cls"], losses["box"]]).detach()
        dist.all_reduce(log, op=dist.ReduceOp.SUM)
        if rank == 0 and it % 3 == 0:
            print(f"iter {it} cls {log[0] / world:.4f} box {log[1] / world:.4f} lr {scheduler.get_last_lr()[0]:.4f}")
        if args.save_period and it % args.save_period == 0:
            checkpointer.save(args.output, it)
        if it >= args.iters:
            break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
