import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful
from torch.distributed.fsdp import fully_shard

from gather import gather_rows
from model import Clip, contrastive_loss
from pairs import VOCAB, pairs


class TrainState(Stateful):
    def __init__(self, model, optimizer):
        self.model, self.optimizer, self.step = model, optimizer, 0

    def state_dict(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim, "step": self.step}

    def load_state_dict(self, state):
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step = state["step"]


def latest(folder):
    done = [d for d in os.listdir(folder) if os.path.isfile(os.path.join(folder, d, ".metadata"))]
    return os.path.join(folder, max(done, key=lambda d: int(d.split("-")[1])))


@torch.no_grad()
def retrieval_accuracy(model, size, rank, world):
    images, ids = pairs(0, size, train=False)
    n = size // world
    img, txt, _ = model(images[rank * n:(rank + 1) * n], ids[rank * n:(rank + 1) * n])
    nearest = (gather_rows(img) @ gather_rows(txt).T).argmax(1)
    return (nearest == torch.arange(size)).float().mean().item()


def main(args):
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(args.seed)
    model = Clip(VOCAB)
    fully_shard(model.image)
    fully_shard(model.text)
    fully_shard(model)
    no_decay = [p for n, p in model.named_parameters() if p.ndim < 2]
    decay = [p for n, p in model.named_parameters() if p.ndim >= 2]
    optimizer = torch.optim.AdamW([{"params": decay, "weight_decay": 0.1}, {"params": no_decay, "weight_decay": 0.0}],
                                  lr=args.lr, eps=1e-6)
    state = TrainState(model, optimizer)
    if args.resume:
        dcp.load({"app": state}, checkpoint_id=latest(args.resume))

    n = args.batch // world
    while state.step < args.steps:
        images, ids = pairs(state.step, args.batch)
        mine = slice(rank * n, (rank + 1) * n)
        img, txt, scale = model(images[mine], ids[mine])
        loss = contrastive_loss(img, txt, scale, rank)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        state.step += 1
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        if rank == 0:
            print(f"[{state.step}/{args.steps}] loss {mean.item() / world:.5f} scale {scale.item():.3f}")
        if args.save_every and state.step % args.save_every == 0:
            dcp.save({"app": state}, checkpoint_id=os.path.join(args.ckpt_dir, f"step-{state.step}"))
    acc = retrieval_accuracy(model, 64, rank, world)
    if rank == 0:
        print(f"retrieval@1 {acc:.3f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--lr", type=float, default=4e-3)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--ckpt-dir", default="checkpoints")
    parser.add_argument("--save-every", type=int, default=0)
    parser.add_argument("--resume")
    main(parser.parse_args())
