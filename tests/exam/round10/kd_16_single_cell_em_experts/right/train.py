"""Generalised EM for a mixture of neural experts: exact E-step, closed-form and gradient M-steps."""
import argparse
import pathlib
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import (StateDictOptions, get_model_state_dict, get_state_dict,
                                                     set_state_dict)

from cells import assay
from mixture import EMState, Mixture


@dataclass
class Plan:
    n_types: int = 3
    rounds: int = 11
    inner: int = 4           # gradient steps per round
    lr: float = 1e-2
    seed: int = 15


class EM:
    def __init__(self, plan):
        self.plan = plan
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(plan.seed)
        stim, expr, which = assay()
        self.n = len(stim)
        part = torch.arange(self.n).tensor_split(self.world)[self.rank]
        self.stim, self.expr, self.which = stim[part], expr[part], which[part]
        self.model = Mixture(plan.n_types, expr.shape[1]).shard()
        self.opt = torch.optim.Adam(self.model.parameters(), lr=plan.lr, eps=1e-5)
        self.em = EMState(plan.n_types, expr.shape[1])
        self.round = 0

    def run_round(self):
        with torch.no_grad():
            resp = self.em.e_step(self.model(self.stim), self.expr)
        for _ in range(self.plan.inner):
            # the mean over all cells; this rank holds a part of the sum, and FSDP averages over the ranks
            expected = -(resp * self.em.log_joint(self.model(self.stim), self.expr)).sum() / self.n
            (expected * self.world).backward()
            self.opt.step()
            self.opt.zero_grad()
        with torch.no_grad():
            self.em.closed_form(resp, self.model(self.stim), self.expr)
        self.round += 1
        # the best matching type for each cluster, from the global contingency table
        table = torch.zeros(self.plan.n_types, self.plan.n_types)
        table.index_put_((resp.argmax(1), self.which), torch.ones(len(resp)), accumulate=True)
        dist.all_reduce(table)
        return table.max(1).values.sum().item() / self.n

    def checkpoint_state(self):
        model, opt = get_state_dict(self.model, self.opt)
        return {"model": model, "opt": opt, "em": self.em.tensors()}

    def save(self, root):
        dcp.save(self.checkpoint_state(), checkpoint_id=str(pathlib.Path(root) / f"round{self.round:02d}"))

    def resume(self, root):
        folder = sorted(p for p in pathlib.Path(root).glob("round*") if (p / ".metadata").exists())[-1]
        state = self.checkpoint_state()
        dcp.load(state, checkpoint_id=str(folder))          # fills the EM tensors in place
        set_state_dict(self.model, self.opt, model_state_dict=state["model"], optim_state_dict=state["opt"])
        self.round = int(folder.name[5:])


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--save-every", type=int, default=0, help="rounds")
    ap.add_argument("--out")
    ap.add_argument("--resume")
    ap.add_argument("--export")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    em = EM(Plan())
    if args.resume:
        em.resume(args.resume)
    while em.round < em.plan.rounds:
        purity = em.run_round()
        if em.rank == 0 and em.round % 2 == 1:
            print(f"round {em.round} log evidence per cell {em.em.bound.item():.4f} purity {purity:.3f} "
                  f"frequencies {[round(v, 3) for v in em.em.log_prior.exp().tolist()]}", flush=True)
        if args.save_every and em.round % args.save_every == 0:
            em.save(args.out)
    full = get_model_state_dict(em.model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if args.export and em.rank == 0:
        torch.save({**full, **{f"em.{k}": v for k, v in em.em.tensors().items()}}, args.export)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
