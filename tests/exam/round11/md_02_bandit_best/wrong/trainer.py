import os
import re

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict


class Trainer:
    def __init__(self, model, opt, train, valid, callbacks, batch=24, seed=11):
        self.model, self.opt = model, opt
        self.train, self.valid, self.callbacks = train, valid, callbacks
        self.batch, self.seed = batch, seed
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.epoch, self.epoch_loss, self.history = 0, 0.0, []

    def _share(self, rows):
        return rows[self.rank::self.world]

    def fit_epoch(self):
        g = torch.Generator().manual_seed(self.seed + self.epoch)
        total = torch.zeros(())
        for rows in torch.randperm(len(self.train), generator=g).split(self.batch):
            part = self.train.rows(self._share(rows))
            logp = torch.log_softmax(self.model(part.ctx), -1).gather(1, part.arm[:, None]).squeeze(1)
            gain = (part.reward - 0.5) / part.prop.clamp(min=0.05)
            loss = -(gain * logp.exp()).sum() / len(rows) * self.world
            loss.backward()
            self.opt.step()
            self.opt.zero_grad()
            total += loss.detach() / self.world
        dist.all_reduce(total)
        self.epoch_loss = total.item() / (len(self.train) / self.batch)

    @torch.no_grad()
    def evaluate(self):
        """Self-normalised inverse propensity estimate on the validation log."""
        part = self.valid.rows(self._share(torch.arange(len(self.valid))))
        pi = F.softmax(self.model(part.ctx), -1).gather(1, part.arm[:, None]).squeeze(1)
        w = pi / part.prop
        sums = torch.stack([(w * part.reward).sum(), w.sum()]).double()
        dist.all_reduce(sums)
        return (sums[0] / sums[1]).float()

    def run(self, epochs, save_every=0, out=None):
        while self.epoch < epochs:
            self.fit_epoch()
            for cb in self.callbacks:
                cb.on_epoch_end(self)
            self.epoch += 1
            if save_every and self.epoch % save_every == 0:
                dcp.save(self.state(), checkpoint_id=os.path.join(out, f"epoch{self.epoch:03d}"))
        for cb in self.callbacks:
            cb.on_train_end(self)

    def state(self):
        return {
            "model": self.model.state_dict(),
            "optim": get_optimizer_state_dict(self.model, self.opt),
            "callbacks": {type(cb).__name__: cb.state_dict() for cb in self.callbacks},
            "epoch": self.epoch,
        }

    def restore(self, folder):
        newest = sorted(d for d in os.listdir(folder) if re.fullmatch(r"epoch\d+", d))[-1]
        state = self.state()
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        self.model.load_state_dict(state["model"])
        set_optimizer_state_dict(self.model, self.opt, state["optim"])
        for cb in self.callbacks:
            cb.load_state_dict(state["callbacks"].get(type(cb).__name__, {}))
        self.epoch = state["epoch"]
