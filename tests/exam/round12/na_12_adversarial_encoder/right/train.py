"""Multilingual translation with a language-adversarial encoder: the critic learns the language, the encoder hides it."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

from corpus import CONCEPTS, LANGUAGES, VOCAB, parallel_batch
from nets import LanguageCritic, Translator


class Trainer:
    def __init__(self, a):
        self.a, self.step = a, 0
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(23)
        self.translator = Translator(VOCAB, CONCEPTS)
        self.critic = LanguageCritic(languages=LANGUAGES)
        for b in self.translator.blocks:
            fully_shard(b)
        fully_shard(self.translator)
        fully_shard(self.critic)
        self.opt_t = torch.optim.AdamW(self.translator.parameters(), lr=a.lr, betas=(0.5, 0.98))
        self.opt_c = torch.optim.RMSprop(self.critic.parameters(), lr=a.lr * 0.5)

    def share(self, batch):
        n = self.a.batch // self.world
        return [t[self.rank * n:(self.rank + 1) * n] for t in batch]

    def critic_turn(self, k):
        ids, _, lang = self.share(parallel_batch(self.step, self.a.batch, salt=k + 1))
        with torch.no_grad():
            states, _ = self.translator(ids)
        self.opt_c.zero_grad()
        loss = F.cross_entropy(self.critic(states), lang)
        loss.backward()
        self.opt_c.step()
        return loss.detach()

    def translator_turn(self):
        ids, target, lang = self.share(parallel_batch(self.step, self.a.batch))
        states, logits = self.translator(ids)
        task = F.cross_entropy(logits.flatten(0, 1), target.flatten())
        weight = self.a.adv * min(1.0, self.step / self.a.adv_warmup)
        # the critic's gradients of this turn are left behind; critic_turn clears them first
        (task - weight * F.cross_entropy(self.critic(states), lang)).backward()
        self.opt_t.step()
        self.opt_t.zero_grad()
        return task.detach()

    def state(self):
        t, to = get_state_dict(self.translator, self.opt_t)
        c, co = get_state_dict(self.critic, self.opt_c)
        return {"translator": t, "translator_opt": to, "critic": c, "critic_opt": co, "step": torch.tensor(self.step)}

    def save(self):
        dcp.save(self.state(), checkpoint_id=os.path.join(self.a.out, f"{self.step:06d}"))

    def load(self, folder):
        names = sorted(os.listdir(folder))
        if not names:
            return
        self.opt_c.zero_grad()
        s = self.state()
        dcp.load(s, checkpoint_id=os.path.join(folder, names[-1]))
        set_state_dict(self.translator, self.opt_t, model_state_dict=s["translator"], optim_state_dict=s["translator_opt"])
        set_state_dict(self.critic, self.opt_c, model_state_dict=s["critic"], optim_state_dict=s["critic_opt"])
        self.step = int(s["step"])

    def run(self):
        while self.step < self.a.steps:
            c_loss = sum(self.critic_turn(k) for k in range(self.a.critic_turns)) / self.a.critic_turns
            t_loss = self.translator_turn()
            self.step += 1
            both = torch.stack([t_loss, c_loss]) / self.world
            dist.all_reduce(both)
            if self.rank == 0 and (self.step == 1 or self.step % 4 == 0):
                print(f"step {self.step}: loss {both[0]:.4f} critic {both[1]:.4f}", flush=True)
            if self.a.out and self.a.save_every and self.step % self.a.save_every == 0:
                self.save()


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--steps", type=int, default=16)
    p.add_argument("--batch", type=int, default=24)
    p.add_argument("--lr", type=float, default=5e-3)
    p.add_argument("--adv", type=float, default=0.3)
    p.add_argument("--adv-warmup", type=int, default=6)
    p.add_argument("--critic-turns", type=int, default=2)
    p.add_argument("--out")
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--resume")
    args = p.parse_args()
    dist.init_process_group("gloo")
    trainer = Trainer(args)
    if args.resume:
        trainer.load(args.resume)
    trainer.run()
    dist.destroy_process_group()
