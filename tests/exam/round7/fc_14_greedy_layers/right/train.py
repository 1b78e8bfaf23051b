"""Greedy layer-wise training of a deep denoising autoencoder, then fine-tuning of the whole.

Phase k trains only the k-th pair (encoder layer, decoder layer) to reconstruct the code of the layers below; the last phase trains everything.
Each phase has its own optimizer, which is forgotten at the end of the phase.
"""
import argparse
import dataclasses
import json
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.fsdp import fully_shard

WIDTHS = (24, 20, 14, 8)


class Pair(nn.Module):
    """One encoder layer and the decoder layer that undoes it."""

    def __init__(self, outer, inner):
        super().__init__()
        self.enc = nn.Linear(outer, inner)
        self.dec = nn.Linear(inner, outer)

    def forward(self, x, inner=None):
        h = torch.tanh(self.enc(x))
        return self.dec(h if inner is None else inner(h))


class Stack(nn.Module):
    def __init__(self):
        super().__init__()
        self.pairs = nn.ModuleList(Pair(a, b) for a, b in zip(WIDTHS, WIDTHS[1:]))

    def forward(self, x, upto):
        """Reconstruct x through the pairs 0..upto (nested: a decoder gets what the inner pairs reconstruct)."""
        def go(i):
            if i > upto:
                return None
            return lambda h: self.pairs[i](h, go(i + 1))
        return self.pairs[0](x, go(1))

    def code(self, x, level):
        for i in range(level):
            x = torch.tanh(self.pairs[i].enc(x))
        return x


@dataclasses.dataclass
class Progress:
    phase: int = 0
    step: int = 0


class Trainer:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(25)
        self.model = Stack()
        # every layer is a root of its own, because a phase calls the layers without going through the whole stack
        for p in self.model.pairs:
            fully_shard(p.enc, reshard_after_forward=True)
            fully_shard(p.dec, reshard_after_forward=True)
        self.progress = Progress()
        self.phases = len(self.model.pairs) + 1
        self.opt = None

    def data(self, phase, step):
        g = torch.Generator().manual_seed(100_000 * (phase + 1) + step)
        basis = torch.randn(5, WIDTHS[0], generator=torch.Generator().manual_seed(2))
        x = torch.tanh(torch.randn(self.args.batch, 5, generator=g) @ basis)
        noisy = x + 0.1 * torch.randn(x.shape, generator=g)
        n = self.args.batch // self.world
        sl = slice(self.rank * n, (self.rank + 1) * n)
        return x[sl], noisy[sl]

    def begin_phase(self, phase):
        final = phase == self.phases - 1
        for i, pair in enumerate(self.model.pairs):
            pair.requires_grad_(final or i == phase)
        params = [p for p in self.model.parameters() if p.requires_grad]
        if final:
            self.opt = torch.optim.SGD(params, lr=0.2, momentum=0.9, nesterov=True)
            for p in params:
                self.opt.state[p]["momentum_buffer"] = torch.zeros_like(p)
        else:
            self.opt = torch.optim.RMSprop(params, lr=4e-3, alpha=0.9)
            for p in params:
                self.opt.state[p].update(step=torch.zeros(()), square_avg=torch.zeros_like(p))

    def loss(self, phase, x, noisy):
        if phase == self.phases - 1:
            return ((self.model(noisy, len(self.model.pairs) - 1) - x) ** 2).mean()
        with torch.no_grad():
            clean, inp = self.model.code(x, phase), self.model.code(noisy, phase)
        return ((self.model.pairs[phase](inp) - clean) ** 2).mean()

    def state(self):
        names = {p: n for n, p in self.model.named_parameters()}
        slots = {f"{names[p]}/{k}": v for p, st in self.opt.state.items() for k, v in st.items()}
        return {"model": self.model.state_dict(), "slots": slots}

    def save(self):
        pr = self.progress
        path = os.path.join(self.args.out, f"p{pr.phase}_s{pr.step:03d}")
        dcp.save(self.state(), checkpoint_id=path)
        if self.rank == 0:
            with open(os.path.join(path, "progress.json"), "w") as f:
                json.dump(dataclasses.asdict(pr), f)
        dist.barrier()

    def resume(self, root):
        path = os.path.join(root, sorted(os.listdir(root))[-1])
        with open(os.path.join(path, "progress.json")) as f:
            self.progress = Progress(**json.load(f))
        self.begin_phase(self.progress.phase)
        st = self.state()
        dcp.load(st, checkpoint_id=path)
        self.model.load_state_dict(st["model"])

    def run(self):
        pr, total = self.progress, self.progress.phase * self.args.phase_steps + self.progress.step
        while pr.phase < self.phases:
            if pr.step == 0:
                self.begin_phase(pr.phase)
            loss = None
            while pr.step < self.args.phase_steps:
                loss = self.loss(pr.phase, *self.data(pr.phase, pr.step))
                loss.backward()
                self.opt.step()
                self.opt.zero_grad()
                pr.step += 1
                total += 1
                if self.args.save_every and total % self.args.save_every == 0:
                    self.save()
            if loss is not None:       # none when a run resumes at the very end of a phase
                mean = loss.detach() / self.world
                dist.all_reduce(mean)
            if self.rank == 0 and loss is not None:
                print(f"phase {pr.phase} last loss {mean.item():.6f}", flush=True)
            pr.phase, pr.step = pr.phase + 1, 0


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--phase-steps", type=int, default=12)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.resume(args.resume)
    trainer.run()
    if args.export:
        full = {n: p.full_tensor() for n, p in trainer.model.state_dict().items()}
        if trainer.rank == 0:
            torch.save(full, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
