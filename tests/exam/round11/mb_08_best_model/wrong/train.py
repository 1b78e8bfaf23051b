"""Lesion classifier with early stopping; the exported model is the one with the lowest validation loss."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from model import LesionNet, patches

MAX_STEPS, BATCH, EVAL_EVERY, PATIENCE = 48, 16, 4, 6


class BestModel:
    """Keeps the best weights and says when to stop."""

    def __init__(self, patience):
        self.patience = patience
        self.loss, self.bad, self.step = float("inf"), 0, 0
        self.weights = None

    def update(self, loss, step, model):
        if loss < self.loss:
            self.loss, self.step, self.bad = loss, step, 0
            self.weights = model.state_dict()
        else:
            self.bad += 1

    @property
    def stop(self):
        return self.bad >= self.patience

    def state_dict(self):
        return {"loss": self.loss, "bad": self.bad, "step": self.step, "weights": self.weights}

    def load_state_dict(self, s):
        self.loss, self.bad, self.step, self.weights = s["loss"], s["bad"], s["step"], s["weights"]


@torch.no_grad()
def evaluate(model, x, y, rank, world):
    part = torch.arange(len(y)).chunk(world)[rank]
    out = model(x[part])
    total = torch.stack([F.cross_entropy(out, y[part], reduction="sum"), (out.argmax(1) == y[part]).sum().float()])
    dist.all_reduce(total)
    return (total / len(y)).tolist()


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--out", default="lesion")
    p.add_argument("--resume", default="")
    p.add_argument("--export", default="")
    args = p.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()

    torch.manual_seed(2)
    model = LesionNet()
    mesh = init_device_mesh("cpu", (world,))
    for s in model.stages:
        fully_shard(s, mesh=mesh)
    fully_shard(model, mesh=mesh)
    opt = torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    best = BestModel(PATIENCE)

    train_x, train_y = patches(128, seed=1, wrong_labels=0.3)
    valid_x, valid_y = patches(64, seed=2)

    step = 0
    if args.resume:
        last = sorted(os.listdir(args.resume))[-1]
        m, o = get_state_dict(model, opt)
        best.weights = {k: v.detach().clone() for k, v in model.state_dict().items()}
        state = {"model": m, "optim": o, "best": best.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(args.resume, last))
        set_state_dict(model, opt, model_state_dict=state["model"], optim_state_dict=state["optim"])
        best.load_state_dict(state["best"])
        step = state["step"]

    while step < MAX_STEPS and not best.stop:
        per_epoch = len(train_y) // BATCH
        epoch, i = divmod(step, per_epoch)
        order = torch.randperm(len(train_y), generator=torch.Generator().manual_seed(epoch))
        idx = order[i * BATCH:(i + 1) * BATCH].chunk(world)[rank]
        loss = F.cross_entropy(model(train_x[idx]), train_y[idx])
        opt.zero_grad()
        loss.backward()
        opt.step()
        step += 1

        if step % EVAL_EVERY == 0:
            valid_loss, accuracy = evaluate(model, valid_x, valid_y, rank, world)
            best.update(valid_loss, step, model)
            log = loss.detach().clone()
            dist.all_reduce(log)
            if rank == 0:
                print(f"step {step} loss {log.item() / world:.4f} valid {valid_loss:.4f} acc {accuracy:.3f} "
                      f"best {best.loss:.4f} @ {best.step}")

        if args.save_every and step % args.save_every == 0:
            m, o = get_state_dict(model, opt)
            dcp.save({"model": m, "optim": o, "best": best.state_dict(), "step": step},
                     checkpoint_id=os.path.join(args.out, f"step{step:04d}"))

    model.load_state_dict(best.weights)
    valid_loss, accuracy = evaluate(model, valid_x, valid_y, rank, world)
    if rank == 0:
        print(f"final model: step {best.step} loss {valid_loss:.4f} acc {accuracy:.3f}")
    if args.export:
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
