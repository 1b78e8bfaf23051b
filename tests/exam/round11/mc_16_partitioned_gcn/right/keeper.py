"""Whole-model checkpoints in one file, which also fit another number of ranks, and the best weights so far."""
import os

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_optimizer_state_dict,
                                                     set_model_state_dict, set_optimizer_state_dict)

FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
SPREAD = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class BestKeeper:
    def __init__(self, patience):
        self.patience, self.score, self.epoch, self.weights = patience, -1.0, -1, None

    def offer(self, model, score, epoch):
        if score > self.score:
            self.score, self.epoch = score, epoch
            self.weights = [p.detach().to_local().clone() for p in model.parameters()]
        return self.exhausted(epoch)

    def exhausted(self, epoch):
        return self.weights is not None and epoch - self.epoch >= self.patience

    @torch.no_grad()
    def restore(self, model):
        for p, w in zip(model.parameters(), self.weights):
            p.to_local().copy_(w)

    @torch.no_grad()
    def exchange(self, model):
        """Best weights into the model and the model's into the store; twice is the identity."""
        for p, w in zip(model.parameters(), self.weights):
            keep = p.to_local().clone()
            p.to_local().copy_(w)
            w.copy_(keep)


def save(path, model, opt, keeper, epoch):
    state = {"epoch": epoch, "model": get_model_state_dict(model, options=FULL),
             "opt": get_optimizer_state_dict(model, opt, options=FULL), "best": (keeper.score, keeper.epoch)}
    keeper.exchange(model)
    state["best_model"] = get_model_state_dict(model, options=FULL)
    keeper.exchange(model)
    if dist.get_rank() == 0:
        os.makedirs(path, exist_ok=True)
        torch.save(state, os.path.join(path, f"epoch{epoch:04d}.pt"))
    dist.barrier()


def load(path, model, opt, keeper):
    newest = max(n for n in os.listdir(path) if n.startswith("epoch"))
    state = torch.load(os.path.join(path, newest))
    root = dist.get_rank() == 0
    set_model_state_dict(model, state["best_model"] if root else {}, options=SPREAD)
    keeper.score, keeper.epoch = state["best"]
    keeper.weights = [p.detach().to_local().clone() for p in model.parameters()]
    set_model_state_dict(model, state["model"] if root else {}, options=SPREAD)
    set_optimizer_state_dict(model, opt, state["opt"] if root else {}, options=SPREAD)
    return state["epoch"]
