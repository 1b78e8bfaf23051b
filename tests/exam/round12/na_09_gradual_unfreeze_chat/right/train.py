"""Chat fine-tuning with gradual unfreezing; the optimizer grows a parameter group with each stage."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from chat_model import ChatLM
from dialogues import CTX, VOCAB, dialogues
from thaw import Thawer


def local(t):
    return t.to_local() if hasattr(t, "to_local") else t


class Run:
    def __init__(self, a):
        self.a = a
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(19)
        self.model = ChatLM(VOCAB, CTX)
        self.thaw = Thawer(self.model)
        for layer in self.model.layers:
            fully_shard(layer)
        fully_shard(self.model)
        self.opt = torch.optim.AdamW(self.thaw.first_group(), weight_decay=0.01)

    def path(self, step):
        return os.path.join(self.a.out or self.a.resume, f"chat-{step:04d}", f"part-{self.rank}-of-{self.world}.pt")

    def save(self, step):
        path = self.path(step)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        names = {p: n for n, p in self.model.named_parameters()}
        moments = {names[p]: {k: local(v) for k, v in s.items()} for p, s in self.opt.state.items()}
        torch.save({"weights": {n: local(p.detach()) for n, p in self.model.named_parameters()}, "moments": moments}, path)
        dist.barrier()

    def load(self):
        steps = sorted(int(d[5:]) for d in os.listdir(self.a.resume) if d.startswith("chat-"))
        if not steps:
            return 0
        step = steps[-1]
        self.thaw.advance(self.opt, step - 1)
        blob = torch.load(self.path(step))
        for n, p in self.model.named_parameters():
            local(p.detach()).copy_(blob["weights"][n])
            if n in blob["moments"]:
                s = blob["moments"][n]
                self.opt.state[p] = {"step": s["step"]}
                for k in ("exp_avg", "exp_avg_sq"):
                    self.opt.state[p][k] = torch.zeros_like(p.detach())
                    local(self.opt.state[p][k]).copy_(s[k])
        return step

    def train(self):
        start = self.load() if self.a.resume else 0
        for step in range(start, self.a.steps):
            self.thaw.advance(self.opt, step)
            ids, labels = (t.chunk(self.world)[self.rank] for t in dialogues(step, self.a.batch))
            count = (labels != -100).sum().float()
            dist.all_reduce(count)
            logits = self.model(ids)
            loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum") / count
            (loss * self.world).backward()
            self.opt.step()
            self.opt.zero_grad()
            shown = loss.detach().clone()
            dist.all_reduce(shown)
            if self.rank == 0 and (step % 4 == 0 or step + 1 == self.a.steps):
                print(f"step {step + 1} groups {len(self.opt.param_groups)} loss {shown.item():.4f}", flush=True)
            if self.a.out and self.a.save_every and (step + 1) % self.a.save_every == 0:
                self.save(step + 1)


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--out", default="")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    a = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(a)
    run.train()
    dist.destroy_process_group()
