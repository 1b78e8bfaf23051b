"""DPO without a second model: the log-probabilities of the untrained policy are computed once for the whole data set,
kept as a table and carried in the checkpoint. Micro-batches are packed by a token budget, so ranks hold different numbers
of pairs; gradients are accumulated without reduction and scaled by the number of pairs of the whole step."""

import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

VOCAB, PAIRS, PAD = 14, 192, 0


class Scorer(nn.Module):
    def __init__(self, width=20):
        super().__init__()
        self.emb = nn.Embedding(VOCAB, width)
        self.gru = nn.GRU(width, width, batch_first=True)
        self.out = nn.Sequential(nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, VOCAB))

    def forward(self, seq):
        h, _ = self.gru(self.emb(seq[:, :-1]))
        logp = self.out(h).log_softmax(-1).gather(-1, seq[:, 1:, None]).squeeze(-1)
        return (logp * (seq[:, 1:] != PAD)).sum(1)


def pairs():
    g = torch.Generator().manual_seed(61)
    good, bad = [], []
    for _ in range(PAIRS):
        n = int(torch.randint(4, 10, (1,), generator=g))
        a = torch.randint(1, VOCAB, (n,), generator=g)
        b = a.clone()
        a[1:] = torch.where(torch.rand(n - 1, generator=g) < 0.7, (a[:-1] % (VOCAB - 1)) + 1, a[1:])
        b[1:] = b[1:][torch.randperm(n - 1, generator=g)]
        good.append(F.pad(a, (0, 10 - n)))
        bad.append(F.pad(b, (0, 10 - n)))
    return torch.stack(good), torch.stack(bad)


def packed(ids, lengths, budget):
    """Cuts this rank's pairs of the step into micro-batches of at most `budget` tokens."""
    box, used = [], 0
    for i in ids:
        if box and used + lengths[i] > budget:
            yield torch.tensor(box)
            box, used = [], 0
        box.append(i)
        used += lengths[i]
    if box:
        yield torch.tensor(box)


class Run:
    def __init__(self, args):
        self.args, self.rank, self.world = args, dist.get_rank(), dist.get_world_size()
        torch.manual_seed(100)
        self.model = Scorer()
        fully_shard(self.model.out)
        fully_shard(self.model)
        self.optim = torch.optim.RMSprop(self.model.parameters(), lr=3e-3, eps=1e-5)
        self.good, self.bad = pairs()
        self.lengths = (self.good != PAD).sum(1).tolist()
        self.baseline = torch.zeros(PAIRS, 2)
        self.step = 0

    def state(self):
        m, o = get_state_dict(self.model, self.optim)
        return {"model": m, "optim": o, "baseline": self.baseline, "step": torch.tensor(self.step)}

    def load(self, folder):
        s = self.state()
        dcp.load(s, checkpoint_id=os.path.join(folder, max(os.listdir(folder))))
        set_state_dict(self.model, self.optim, model_state_dict=s["model"], optim_state_dict=s["optim"])
        self.baseline, self.step = s["baseline"], int(s["step"])

    @torch.no_grad()
    def measure_baseline(self):
        """Each rank measures every world-th pair; the zeros elsewhere make the sum the full table."""
        own = torch.arange(self.rank, PAIRS, self.world)
        self.baseline[own, 0] = self.model(self.good[own])
        self.baseline[own, 1] = self.model(self.bad[own])
        dist.all_reduce(self.baseline)

    def train_step(self):
        g = torch.Generator().manual_seed(3000 + self.step)
        chosen = torch.randperm(PAIRS, generator=g)[: self.args.batch]
        boxes = list(packed(chosen[self.rank :: self.world].tolist(), self.lengths, self.args.budget))
        # everyone makes the same number of passes: who has fewer boxes adds empty ones
        most = torch.tensor(len(boxes))
        dist.all_reduce(most, op=dist.ReduceOp.MAX)
        total = torch.zeros(())
        for k in range(int(most)):
            ids = boxes[k] if k < len(boxes) else None
            self.model.set_requires_gradient_sync(k == int(most) - 1)
            use = ids if ids is not None else torch.zeros(1, dtype=torch.long)
            both = self.model(torch.cat([self.good[use], self.bad[use]])).view(2, -1)
            gap = (both[0] - self.baseline[use, 0]) - (both[1] - self.baseline[use, 1])
            loss = -F.logsigmoid(self.args.beta * gap).sum() * (0.0 if ids is None else 1.0)
            (loss * self.world / self.args.batch).backward()
            total += loss.detach()
        self.optim.step()
        self.optim.zero_grad()
        self.step += 1
        dist.all_reduce(total)
        return total.item() / self.args.batch, int(most)


def main():
    ap = argparse.ArgumentParser()
    for name, kind, default in [
        ("steps", int, 28),
        ("batch", int, 32),
        ("budget", int, 40),
        ("beta", float, 0.3),
        ("save-every", int, 0),
        ("out", str, None),
        ("resume", str, None),
    ]:
        ap.add_argument(f"--{name}", type=kind, default=default)
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load(args.resume)
    else:
        run.measure_baseline()
    while run.step < args.steps:
        loss, passes = run.train_step()
        if run.rank == 0:
            print(f"step {run.step:3d} dpo loss {loss:.4f} passes {passes}", flush=True)
        if args.out and args.save_every and run.step % args.save_every == 0:
            dcp.save(run.state(), checkpoint_id=os.path.join(args.out, f"{run.step:06d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
