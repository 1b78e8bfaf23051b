import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F


class Trainer:
    def __init__(self, net, lr, train, valid, batch, eval_every, callbacks):
        self.net, self.train, self.valid = net, train, valid
        self.optim = torch.optim.Adagrad(net.parameters(), lr=lr, eps=1e-6)
        self.batch, self.eval_every, self.callbacks = batch, eval_every, callbacks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step, self.stop, self.last_loss = 0, False, None

    @property
    def lr(self):
        return self.optim.param_groups[0]["lr"]

    def set_lr(self, lr):
        for g in self.optim.param_groups:
            g["lr"] = lr

    def fire(self, event, *what):
        for c in self.callbacks:
            getattr(c, event)(self, *what)

    def evaluate(self):
        self.net.eval()
        x, y = (t[self.rank :: self.world] for t in self.valid)
        with torch.no_grad():
            s = F.binary_cross_entropy_with_logits(self.net(x), y, reduction="sum").double()
        self.net.train()
        dist.all_reduce(s)
        return s.item() / len(self.valid[0])

    def fit(self, until):
        x, y = self.train
        while self.step < until and not self.stop:
            g = torch.Generator().manual_seed(1700 + self.step)
            rows = torch.randperm(len(x), generator=g)[: self.batch][self.rank :: self.world]
            loss = F.binary_cross_entropy_with_logits(self.net(x[rows]), y[rows])
            self.optim.zero_grad()
            loss.backward()
            self.moment_step()
            self.step += 1
            self.last_loss = loss.detach()
            if self.step % self.eval_every == 0:
                self.fire("on_eval", self.evaluate())
            self.fire("on_step")

    def moment_step(self):
        # the counter matters to lr_decay alone, which is zero; Adagrad makes its sums in the constructor; after a rollback they are made again here
        for p in self.net.parameters():
            if p not in self.optim.state:
                self.optim.state[p] = {"step": torch.zeros(()), "sum": torch.zeros_like(p)}
        self.optim.step()

    def state(self):
        # evaluation leaves the root gathered; the parameters must be shards before their names are taken
        self.net.reshard()
        names = {p: n for n, p in self.net.named_parameters()}
        sums = {names[p]: self.optim.state[p]["sum"] if p in self.optim.state else torch.zeros_like(p) for p in names}
        return {
            "net": self.net.state_dict(),
            "sums": sums,
            "lr": torch.tensor(self.lr, dtype=torch.float64),
            "step": torch.tensor(self.step),
            "stop": torch.tensor(self.stop),
            "callbacks": {c.key: c.state_dict() for c in self.callbacks if c.key},
        }

    def load(self, folder):
        s = self.state()
        dcp.load(s, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        self.net.load_state_dict(s["net"])
        for n, p in self.net.named_parameters():
            self.optim.state[p] = {"step": torch.zeros(()), "sum": s["sums"][n]}
        self.set_lr(float(s["lr"]))
        self.step, self.stop = int(s["step"]), bool(s["stop"])
        for c in self.callbacks:
            if c.key:
                c.load_state_dict(s["callbacks"][c.key])
