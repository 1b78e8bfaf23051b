"""Character model on text from a random Markov chain, with quantile-based gradient clipping."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from autoclip import AutoClip
from lm import CharLM, LMConfig


def markov_text(n, vocab, seed=21):
    g = torch.Generator().manual_seed(seed)
    table = torch.softmax(2.5 * torch.randn(vocab, vocab, generator=g), -1)
    ids = [0]
    for u in torch.rand(n - 1, generator=g).tolist():
        ids.append(min(int(torch.searchsorted(table[ids[-1]].cumsum(0), u)), vocab - 1))
    return torch.tensor(ids)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.cfg = LMConfig()
        torch.manual_seed(4)
        self.model = CharLM(self.cfg)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=args.lr, momentum=0.8)
        self.clip = AutoClip(self.model.parameters())
        text = markov_text(6000, self.cfg.vocab)
        self.train_text, self.valid_text = text[:5000], text[5000:]
        self.step = 0

    def windows(self, text, starts):
        rows = torch.stack([text[s:s + self.cfg.context + 1] for s in starts.tolist()])
        return rows[:, :-1], rows[:, 1:]

    def batch(self, step):
        g = torch.Generator().manual_seed(9000 + step)
        starts = torch.randint(len(self.train_text) - self.cfg.context, (self.args.batch,), generator=g)
        share = self.args.batch // self.world
        return self.windows(self.train_text, starts[self.rank * share:(self.rank + 1) * share])

    def loss(self, x, y):
        return F.cross_entropy(self.model(x), y.flatten())

    def train_step(self):
        loss = self.loss(*self.batch(self.step))
        self.optimizer.zero_grad()
        loss.backward()
        norm, limit = self.clip()
        self.optimizer.step()
        self.step += 1
        total = loss.detach().clone()
        dist.all_reduce(total)
        return total.item() / self.world, norm, limit

    @torch.no_grad()
    def validate(self):
        x, y = self.windows(self.valid_text, torch.arange(0, 960, self.cfg.context))
        return self.loss(x, y).item()

    def save(self):
        model, optim = get_state_dict(self.model, self.optimizer)
        state = {"model": model, "optim": optim, "clip": self.clip.state_dict(), "step": self.step}
        dcp.save(state, checkpoint_id=os.path.join(self.args.save_to, f"ckpt-{self.step:05d}"))

    def restore(self, folder):
        newest = sorted(d for d in os.listdir(folder) if d.startswith("ckpt-"))[-1]
        model, optim = get_state_dict(self.model, self.optimizer)
        self.step = int(newest.split("-")[1])
        state = {"model": model, "optim": optim,
                 "clip": {"norms": [0.0] * min(self.step, self.clip.history)}, "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.clip.load_state_dict(state["clip"])

    def fit(self):
        if self.args.resume_from:
            self.restore(self.args.resume_from)
        while self.step < self.args.steps:
            loss, norm, limit = self.train_step()
            if self.rank == 0 and self.step % 5 == 0:
                print(f"step {self.step} loss {loss:.5f} grad norm {norm:.4f} limit {limit:.4f}", flush=True)
            if self.args.save_interval and self.step % self.args.save_interval == 0:
                self.save()
        valid = self.validate()
        if self.rank == 0:
            print(f"valid loss {valid:.5f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--lr", type=float, default=0.3)
    parser.add_argument("--save-interval", type=int, default=0)
    parser.add_argument("--save-to")
    parser.add_argument("--resume-from")
    dist.init_process_group("gloo")
    Trainer(parser.parse_args()).fit()
    dist.destroy_process_group()
