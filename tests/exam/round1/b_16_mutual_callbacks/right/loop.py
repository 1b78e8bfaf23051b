from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful


@dataclass
class Peer:
    name: str
    net: torch.nn.Module
    opt: torch.optim.Optimizer


class MutualLoop(Stateful):
    """Deep mutual learning: every peer follows the labels and the (detached) other peers."""

    def __init__(self, peers, data, batch, callbacks):
        self.peers, self.data, self.batch, self.callbacks = peers, data, batch, callbacks
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.step, self.schedulers = 0, []

    def emit(self, event, *a):
        for cb in self.callbacks:
            out = getattr(cb, event)(self, *a)
            if event == "on_batch":
                a = out
        return a

    def run(self, steps):
        self.emit("on_start")
        while self.step < steps:
            x, y = self.emit("on_batch", *self.data(self.step, self.batch))
            x, y = x.chunk(self.world)[self.rank], y.chunk(self.world)[self.rank]
            logits = [p.net(x) for p in self.peers]
            logs = {}
            for i, p in enumerate(self.peers):
                own = F.log_softmax(logits[i], -1)
                loss = F.nll_loss(own, y)
                for j, other in enumerate(logits):
                    if j != i:
                        loss = loss + 0.5 * F.kl_div(own, F.softmax(other.detach(), -1), reduction="batchmean")
                loss.backward()
                logs[p.name] = loss.item()
            for p in self.peers:
                torch.nn.utils.clip_grad_norm_(p.net.parameters(), 2.0)
                p.opt.step()
                p.opt.zero_grad()
            self.step += 1
            self.emit("on_step", logs)
        self.emit("on_end")

    def state_dict(self):
        out = {"step": self.step, "sched": {str(i): s.state_dict() for i, s in enumerate(self.schedulers)}}
        for p in self.peers:
            m, o = get_state_dict(p.net, p.opt)
            out[p.name] = {"model": m, "optim": o}
        return out

    def load_state_dict(self, sd):
        self.step = sd["step"]
        for p in self.peers:
            set_state_dict(p.net, p.opt, model_state_dict=sd[p.name]["model"], optim_state_dict=sd[p.name]["optim"])
        for i, s in enumerate(self.schedulers):
            s.load_state_dict(sd["sched"][str(i)])
