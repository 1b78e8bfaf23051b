"""Snapshots in memory: copies of this rank's shards and of the optimizer's tensors."""
import torch


class Snapshot:
    @torch.no_grad()
    def __init__(self, model, opt, step):
        self.step = step
        self.params = [p.detach().clone() for p in model.parameters()]
        self.slots = [{k: v.clone() for k, v in opt.state[p].items()} for p in model.parameters()]

    @torch.no_grad()
    def restore(self, model, opt):
        for p, kept, slots in zip(model.parameters(), self.params, self.slots):
            p.copy_(kept)
            opt.state[p] = {k: v.clone() for k, v in slots.items()}
        return self.step
