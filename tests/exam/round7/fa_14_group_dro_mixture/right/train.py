"""Language model on a mixture of domains with group DRO: the weights of the domains follow their losses (exponentiated
gradient), and every domain's loss is a mean over its tokens in the global batch."""
import argparse
import json
import os
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

DOMAINS, VOCAB, LENGTH, BATCH = 3, 21, 10, 24


@dataclass
class RunState:
    """What has to be remembered beside model and optimizer."""

    step: int = 0
    weights: list = field(default_factory=lambda: [1.0 / DOMAINS] * DOMAINS)
    loss_sum: list = field(default_factory=lambda: [0.0] * DOMAINS)
    loss_count: list = field(default_factory=lambda: [0] * DOMAINS)


class BigramMLP(nn.Module):
    def __init__(self, dim=32):
        super().__init__()
        self.a, self.b = nn.Embedding(VOCAB + 1, dim), nn.Embedding(VOCAB, dim)
        self.hidden = nn.Sequential(nn.Linear(dim, 2 * dim), nn.GELU(), nn.Linear(2 * dim, dim), nn.LayerNorm(dim))
        self.head = nn.Linear(dim, VOCAB)

    def forward(self, ids):
        before = F.pad(ids[:, :-1], (1, 0), value=VOCAB)
        return self.head(self.hidden(self.a(before) + self.b(ids)))


def documents(step, rank, world):
    """Token ids, domain and length of this rank's documents. The domains differ in difficulty and in frequency."""
    g = torch.Generator().manual_seed(3 * step + 1)
    domain = torch.multinomial(torch.tensor([0.6, 0.3, 0.1]), BATCH, replacement=True, generator=g)
    length = torch.randint(3, LENGTH + 1, (BATCH,), generator=g)
    ids = [torch.randint(0, VOCAB, (BATCH,), generator=g) for _ in range(2)]
    for _ in range(LENGTH - 1):
        nxt = torch.where(domain == 0, ids[-1] + 1, torch.where(domain == 1, ids[-1] + ids[-2], 2 * ids[-1] + 3 * ids[-2] + 1))
        ids.append(nxt % VOCAB)
    ids = torch.stack(ids, 1)
    return ids[rank::world], domain[rank::world], length[rank::world]


def domain_sums(logits, targets, domain, length):
    """Loss sums (with gradient) and token counts of every domain on this rank."""
    loss = F.cross_entropy(logits.transpose(1, 2), targets, reduction="none")
    valid = (torch.arange(targets.shape[1]) < length[:, None]).float()
    member = F.one_hot(domain, DOMAINS).float()
    return member.t() @ (loss * valid).sum(1), member.t() @ valid.sum(1)


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(12)
        self.model = BigramMLP()
        fully_shard(self.model.hidden)
        fully_shard(self.model)
        self.opt = torch.optim.NAdam(self.model.parameters(), lr=1e-2)
        self.run = RunState()

    def update(self):
        ids, domain, length = documents(self.run.step, self.rank, self.world)
        sums, counts = domain_sums(self.model(ids[:, :-1]), ids[:, 1:], domain, length)
        totals = torch.stack([sums.detach(), counts]).double()
        dist.all_reduce(totals)
        present = totals[1] > 0
        mean = torch.where(present, totals[0] / totals[1].clamp(min=1), 0.0)

        # first the domain weights move (all ranks compute the same), then the model against them
        w = torch.tensor(self.run.weights, dtype=torch.double) * torch.exp(0.2 * mean)
        w = 0.97 * w / w.sum() + 0.03 / DOMAINS
        self.run.weights = w.tolist()

        # weighted sum of the domains' means; the world size undoes the average over the ranks
        scale = torch.where(present, w / totals[1].clamp(min=1), 0.0).float()
        self.opt.zero_grad()
        (self.world * (scale * sums).sum()).backward()
        self.opt.step()

        for d in range(DOMAINS):
            self.run.loss_sum[d] += totals[0, d].item()
            self.run.loss_count[d] += int(totals[1, d])
        self.run.step += 1
        return mean

    def tensors(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt}

    def save(self):
        folder = os.path.join(self.args.out, f"{self.run.step:08d}")
        dcp.save(self.tensors(), checkpoint_id=folder)
        if self.rank == 0:
            with open(os.path.join(folder, "run.json"), "w") as f:
                json.dump(asdict(self.run), f)
        dist.barrier()

    def load(self):
        folder = os.path.join(self.args.resume, max(os.listdir(self.args.resume)))
        state = self.tensors()
        dcp.load(state, checkpoint_id=folder)
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        with open(os.path.join(folder, "run.json")) as f:
            self.run = RunState(**json.load(f))

    def fit(self):
        while self.run.step < self.args.steps:
            mean = self.update()
            if self.rank == 0 and self.run.step % 4 == 0:
                text = " ".join(f"{m:.3f}" for m in mean.tolist())
                print(f"step {self.run.step} losses {text} weights {' '.join(f'{w:.4f}' for w in self.run.weights)}", flush=True)
            if self.args.save_every and self.run.step % self.args.save_every == 0 and self.run.step < self.args.steps:
                self.save()
        if self.rank == 0:
            print("mean loss per domain over the run", [round(s / max(c, 1), 5) for s, c in zip(self.run.loss_sum, self.run.loss_count)])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--steps", type=int, default=20)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out", default="")
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load()
    trainer.fit()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
