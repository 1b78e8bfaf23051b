"""SFT warm-up followed by DPO against the frozen SFT model."""
import argparse
import glob
import os
from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import fully_shard

from data import global_pairs, my_share
from policy import Policy, response_logps


@dataclass
class Config:
    vocab: int = 32
    batch: int = 16
    sft_steps: int = 8
    dpo_steps: int = 16
    sft_lr: float = 5e-3
    dpo_lr: float = 2e-3
    beta: float = 0.3
    clip: float = 2.0


class Trainer:
    def __init__(self, cfg, out, save_every):
        self.cfg, self.out, self.save_every = cfg, out, save_every
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(1234)
        self.policy = self.shard(Policy(cfg.vocab))
        self.reference = self.shard(Policy(cfg.vocab)).requires_grad_(False)
        self.opt = torch.optim.Adam(self.policy.parameters(), lr=cfg.sft_lr)
        self.step = 0

    @staticmethod
    def shard(model):
        fully_shard(model.rnn)
        return fully_shard(model)

    def freeze_reference(self):
        with torch.no_grad():
            for ref, p in zip(self.reference.parameters(), self.policy.parameters()):
                ref.copy_(p)

    def log(self, tag, value):
        value = value.detach().clone()
        dist.all_reduce(value)
        if self.rank == 0:
            print(f"{tag} step {self.step} loss {value.item() / self.world:.4f}", flush=True)

    def update(self, loss):
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.policy.parameters(), self.cfg.clip)
        self.opt.step()
        self.opt.zero_grad()

    def batch(self):
        return my_share(global_pairs(self.step, self.cfg.batch, self.cfg.vocab), self.rank, self.world)

    def sft_step(self):
        chosen, _, mask = self.batch()
        loss = -(response_logps(self.policy, chosen, mask) / mask[:, 1:].sum(-1)).mean()
        self.update(loss)
        self.log("sft", loss)

    def dpo_step(self):
        chosen, rejected, mask = self.batch()
        ids, both = torch.cat([chosen, rejected]), torch.cat([mask, mask])
        w, l = response_logps(self.policy, ids, both).chunk(2)
        with torch.no_grad():
            ref_w, ref_l = response_logps(self.reference, ids, both).chunk(2)
        loss = -F.logsigmoid(self.cfg.beta * ((w - ref_w) - (l - ref_l))).mean()
        self.update(loss)
        self.log("dpo", loss)

    def begin_dpo(self):
        self.freeze_reference()
        for group in self.opt.param_groups:
            group["lr"] = self.cfg.dpo_lr
        self.opt.state.clear()

    def run(self):
        cfg = self.cfg
        while self.step < cfg.sft_steps + cfg.dpo_steps:
            if self.step == cfg.sft_steps:
                self.begin_dpo()
            if self.step < cfg.sft_steps:
                self.sft_step()
            else:
                self.dpo_step()
            self.step += 1
            if self.save_every and self.step % self.save_every == 0:
                self.save()

    def save(self):
        folder = os.path.join(self.out, f"ckpt_{self.step:05d}")
        os.makedirs(folder, exist_ok=True)
        torch.save(
            {
                "policy": self.policy.state_dict(),
                "reference": self.reference.state_dict(),
                "opt": self.opt.state_dict(),
                "step": self.step,
            },
            os.path.join(folder, f"rank{self.rank}of{self.world}.pt"),
        )
        dist.barrier()

    def load(self, root):
        folder = sorted(glob.glob(os.path.join(root, "ckpt_*")))[-1]
        state = torch.load(os.path.join(folder, f"rank{self.rank}of{self.world}.pt"), weights_only=False)
        self.policy.load_state_dict(state["policy"])
        self.reference.load_state_dict(state["reference"])
        self.opt.load_state_dict(state["opt"])
        self.step = state["step"]


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out", default="")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume", default="")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(Config(), args.out, args.save_every)
    if args.resume:
        trainer.load(args.resume)
    trainer.run()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
