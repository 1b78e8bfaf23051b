"""Three phases with one model: supervised warm-up, one distributed pass that stores the reference
log-probabilities of the whole preference set, then IPO against the stored numbers (no reference model)."""
import argparse
import itertools
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from corpus import batches, build
from lm import ConvLM, token_logp

N, BATCH, BETA = 256, 32, 0.3


def build_optimizer(model, phase):
    if phase == "sft":
        return torch.optim.AdamW(model.parameters(), lr=4e-3, weight_decay=0.01)
    return torch.optim.SGD(model.parameters(), lr=0.02, momentum=0.9, nesterov=True)


class Run:
    def __init__(self, args):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(8)
        self.model = ConvLM()
        for conv in self.model.convs:
            fully_shard(conv)
        fully_shard(self.model, reshard_after_forward=True)
        self.chosen, self.rejected, self.mask = build(N)
        self.reference = torch.zeros(2, N)
        self.phase, self.step = "sft", 0
        self.optimizer = build_optimizer(self.model, "sft")

    def mine(self, idx):
        return idx.chunk(self.world)[self.rank]

    def report(self, loss, reduce=True):
        if reduce:
            loss = loss.detach() / self.world
            dist.all_reduce(loss)
        if self.rank == 0:
            print(f"{self.phase} {self.step} loss {loss.item():.6f}", flush=True)

    def sft(self, steps):
        for idx in itertools.islice(batches(N, BATCH, 99, seed=50), self.step, steps):
            tokens = self.mask[idx].sum()
            idx = self.mine(idx)
            nll = -(token_logp(self.model, self.chosen[idx]) * self.mask[idx]).sum()
            # the mean over the tokens of all ranks; fully_shard averages over ranks
            loss = nll * self.world / tokens
            loss.backward()
            self.finish(loss)

    def finish(self, loss):
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.report(loss)
        if self.args.out and self.step % self.args.save_every == 0:
            self.save()

    @torch.no_grad()
    def store_reference(self):
        idx = self.mine(torch.arange(N))
        rows = [(token_logp(self.model, ids[idx]) * self.mask[idx]).sum(1) for ids in (self.chosen, self.rejected)]
        self.reference = torch.zeros(2, N)
        self.reference[:, idx] = torch.stack(rows)
        dist.all_reduce(self.reference)

    def ipo(self, steps):
        for idx in itertools.islice(batches(N, BATCH, 99, seed=90), self.step, steps):
            idx = self.mine(idx)
            mask = self.mask[idx]
            good = (token_logp(self.model, self.chosen[idx]) * mask).sum(1) - self.reference[0, idx]
            bad = (token_logp(self.model, self.rejected[idx]) * mask).sum(1) - self.reference[1, idx]
            loss = ((good - bad) / mask.sum(1) - 1 / (2 * BETA)).square().mean()
            loss.backward()
            self.finish(loss)

    def fit(self):
        if self.phase == "sft":
            self.sft(self.args.sft_steps)
            self.store_reference()
            self.phase, self.step = "ipo", 0
            self.optimizer = build_optimizer(self.model, "ipo")
        self.ipo(self.args.ipo_steps)

    def save(self):
        m, o = get_state_dict(self.model, self.optimizer)
        order = {"sft": 0, "ipo": 1}[self.phase]
        dcp.save({"model": m, "optim": o, "reference": self.reference},
                 checkpoint_id=f"{self.args.out}/{order}_{self.phase}_{self.step:04d}")

    def load(self, folder):
        name = max(os.listdir(folder))
        _, self.phase, step = name.split("_")
        self.step = int(step)
        self.optimizer = build_optimizer(self.model, self.phase)
        m, o = get_state_dict(self.model, self.optimizer)
        state = {"model": m, "optim": o, "reference": self.reference}
        dcp.load(state, checkpoint_id=os.path.join(folder, name))
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.reference = state["reference"]


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--sft-steps", type=int, default=14)
    ap.add_argument("--ipo-steps", type=int, default=16)
    ap.add_argument("--save-every", type=int, default=6)
    ap.add_argument("--out")
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    run = Run(args)
    if args.resume:
        run.load(args.resume)
    run.fit()
    dist.destroy_process_group()
