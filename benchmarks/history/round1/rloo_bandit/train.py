"""RLOO (leave-one-out REINFORCE) for a contextual slot-filling policy.

The trainer is organised with callbacks: a handler dispatches events, callbacks that carry
state export it into the trainer state so that checkpoints can restore it.

    torchrun --nproc-per-node 2 train.py --save-every 5 --ckpt runs/rloo
    torchrun --nproc-per-node 2 train.py --resume --ckpt runs/rloo
"""
import argparse
import json
import os
from dataclasses import asdict, dataclass, field

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

CONTEXT, SLOTS, CHOICES = 12, 5, 8


@dataclass
class TrainerState:
    global_step: int = 0
    episode: int = 0
    stateful_callbacks: dict = field(default_factory=dict)

    @classmethod
    def create(cls, callbacks=()):
        return cls(stateful_callbacks={type(cb).__name__: cb.state() for cb in callbacks})


class ExportableState:
    """Mixin of objects whose state goes into checkpoints."""

    def state(self):
        raise NotImplementedError

    def restore(self, state):
        self.__dict__.update(state)


@dataclass
class TrainerControl(ExportableState):
    should_save: bool = False
    should_stop: bool = False

    def state(self):
        return {"should_save": self.should_save, "should_stop": self.should_stop}


class Callback:
    def on_step_end(self, args, state, control, metrics):
        pass


class FlowCallback(Callback):
    def on_step_end(self, args, state, control, metrics):
        control.should_save = bool(args.save_every) and state.global_step % args.save_every == 0
        control.should_stop = state.global_step >= args.updates


class KLController(Callback, ExportableState):
    """Moves the KL coefficient towards a target divergence."""

    def __init__(self, coef=0.05, target=0.25, rate=0.1):
        self.coef, self.target, self.rate = coef, target, rate

    def on_step_end(self, args, state, control, metrics):
        error = max(-1.0, min(1.0, metrics["kl"] / self.target - 1.0))
        self.coef *= 1.0 + self.rate * error

    def state(self):
        return {"coef": self.coef}


class PrinterCallback(Callback):
    def on_step_end(self, args, state, control, metrics):
        if dist.get_rank() == 0:
            body = " ".join(f"{k} {v:.6f}" for k, v in metrics.items())
            print(f"step {state.global_step} episode {state.episode} {body}", flush=True)


class CallbackHandler:
    def __init__(self, callbacks):
        self.callbacks = list(callbacks)

    def on_step_end(self, *a):
        for cb in self.callbacks:
            cb.on_step_end(*a)


class ResidualBlock(nn.Module):
    def __init__(self, dim):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.ff = nn.Sequential(nn.Linear(dim, 2 * dim), nn.SiLU(), nn.Linear(2 * dim, dim))

    def forward(self, x):
        return x + self.ff(self.norm(x))


class Policy(nn.Module):
    def __init__(self, dim=32, depth=2):
        super().__init__()
        self.inp = nn.Linear(CONTEXT, dim)
        self.blocks = nn.ModuleList(ResidualBlock(dim) for _ in range(depth))
        self.out = nn.Linear(dim, SLOTS * CHOICES)

    def forward(self, context):
        x = self.inp(context)
        for block in self.blocks:
            x = block(x)
        return self.out(x).unflatten(-1, (SLOTS, CHOICES)).log_softmax(-1)


class RLOOTrainer:
    def __init__(self, args, callbacks=()):
        self.args = args
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(args.seed)
        self.model = Policy()
        self.ref_model = Policy().requires_grad_(False)
        self.ref_model.load_state_dict(self.model.state_dict())
        self.best_choice = torch.randn(CONTEXT, SLOTS * CHOICES)
        for block in self.model.blocks:
            fully_shard(block)
        fully_shard(self.model)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=args.lr, weight_decay=0.0)

        self.callback_handler = CallbackHandler([FlowCallback(), *callbacks, PrinterCallback()])
        self.control = TrainerControl()
        self.state = TrainerState.create(self.exportable())

    def exportable(self):
        return [cb for cb in self.callback_handler.callbacks + [self.control] if isinstance(cb, ExportableState)]

    def sample_batch(self, step):
        """Contexts of the global batch and the sampling noise, cut to this rank."""
        gen = torch.Generator().manual_seed(self.args.seed * 9973 + step)
        context = torch.randn(self.args.batch_size, CONTEXT, generator=gen)
        u = torch.rand(self.args.batch_size, self.args.rloo_k, SLOTS, CHOICES, generator=gen)
        noise = -torch.log(-torch.log(u.clamp(1e-9, 1 - 1e-7)))
        return context[self.rank :: self.world], noise[self.rank :: self.world]

    def reward(self, context, actions):
        utility = (context @ self.best_choice).unflatten(-1, (SLOTS, CHOICES)).softmax(-1)
        picked = utility.unsqueeze(1).expand(-1, actions.shape[1], -1, -1).gather(-1, actions.unsqueeze(-1))
        return picked.squeeze(-1).mean(-1)

    def mean(self, *values):
        t = torch.stack([v.detach() for v in values])
        dist.all_reduce(t)
        return (t / self.world).tolist()

    def kl_coef(self):
        for cb in self.callback_handler.callbacks:
            if isinstance(cb, KLController):
                return cb.coef
        return 0.0

    def update(self, step):
        context, noise = self.sample_batch(step)
        with torch.no_grad():
            logps = self.model(context)
            actions = (logps.unsqueeze(1) + noise).argmax(-1)
            ref = self.ref_model(context)
            reward = self.reward(context, actions)
            index = actions.unsqueeze(-1)

            def total(table):
                return table.unsqueeze(1).expand(-1, actions.shape[1], -1, -1).gather(-1, index).squeeze(-1).sum(-1)

            kl = total(logps) - total(ref)
            score = reward - self.kl_coef() * kl
            k = self.args.rloo_k
            baseline = (score.sum(1, keepdim=True) - score) / (k - 1)
            advantage = score - baseline
        table = self.model(context)
        new = table.unsqueeze(1).expand(-1, actions.shape[1], -1, -1).gather(-1, index).squeeze(-1).sum(-1)
        loss = -(advantage * new).mean()
        loss.backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()
        loss, reward, kl = self.mean(loss, reward.mean(), kl.mean())
        return {"loss": loss, "reward": reward, "kl": kl, "kl_coef": self.kl_coef()}

    def train(self):
        while not self.control.should_stop:
            metrics = self.update(self.state.global_step)
            self.state.global_step += 1
            self.state.episode += self.args.batch_size
            self.callback_handler.on_step_end(self.args, self.state, self.control, metrics)
            if self.control.should_save:
                self.save_checkpoint()

    def save_checkpoint(self):
        path = os.path.join(self.args.ckpt, f"checkpoint-{self.state.global_step}")
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=path)
        for cb in self.exportable():
            self.state.stateful_callbacks[type(cb).__name__].update(cb.state())
        if self.rank == 0:
            with open(os.path.join(path, "trainer_state.json"), "w") as f:
                json.dump(asdict(self.state), f, indent=1)
        dist.barrier()

    def load_checkpoint(self):
        found = [d for d in os.listdir(self.args.ckpt) if d.startswith("checkpoint-")]
        path = os.path.join(self.args.ckpt, max(found, key=lambda d: int(d.split("-")[1])))
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.load({"model": model_sd, "optim": optim_sd}, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=model_sd, optim_state_dict=optim_sd)
        with open(os.path.join(path, "trainer_state.json")) as f:
            self.state = TrainerState(**json.load(f))
        for cb in self.exportable():
            cb.restore(self.state.stateful_callbacks[type(cb).__name__])


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--updates", type=int, default=24)
    p.add_argument("--batch-size", type=int, default=32)
    p.add_argument("--rloo-k", type=int, default=4)
    p.add_argument("--lr", type=float, default=3e-3)
    p.add_argument("--seed", type=int, default=11)
    p.add_argument("--save-every", type=int, default=0)
    p.add_argument("--ckpt", default=None)
    p.add_argument("--resume", action="store_true")
    args = p.parse_args()

    dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo")
    trainer = RLOOTrainer(args, callbacks=[KLController()])
    if args.resume:
        trainer.load_checkpoint()
    trainer.train()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
