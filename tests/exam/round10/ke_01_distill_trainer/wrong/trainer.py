import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict


class Callback:
    def on_step_end(self, trainer, logs):
        pass


class PrintLoss(Callback):
    def __init__(self, every=4):
        self.every = every

    def on_step_end(self, trainer, logs):
        if trainer.rank == 0 and trainer.step % self.every == 0:
            print(f"step {trainer.step:3d} loss {logs['loss']:.4f} tokens {logs['tokens']:.0f}", flush=True)


class Checkpointer(Callback):
    def __init__(self, folder, every):
        self.folder, self.every = folder, every

    def on_step_end(self, trainer, logs):
        if trainer.step % self.every == 0:
            model_sd, optim_sd = get_state_dict(trainer.student, trainer.optimizer)
            dcp.save(
                {"model": model_sd, "optim": optim_sd, "sched": trainer.scheduler.state_dict(), "step": trainer.step},
                checkpoint_id=os.path.join(self.folder, f"step_{trainer.step:06d}"),
            )


class DistillTrainer:
    def __init__(self, cfg, student, teacher, data, callbacks=()):
        self.cfg, self.student, self.teacher, self.data = cfg, student, teacher, data
        self.callbacks = list(callbacks)
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        self.optimizer = torch.optim.AdamW(student.parameters(), lr=cfg.lr, weight_decay=0.01, eps=1e-6)
        self.scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(self.optimizer, cfg.steps, eta_min=cfg.lr * 0.1)
        self.step = 0

    def resume(self, folder):
        newest = sorted(d for d in os.listdir(folder) if d.startswith("step_"))[-1]
        model_sd, optim_sd = get_state_dict(self.student, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd, "sched": self.scheduler.state_dict(), "step": 0}
        dcp.load(state, checkpoint_id=os.path.join(folder, newest))
        set_state_dict(
            self.student, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"]
        )
        self.scheduler.load_state_dict(state["sched"])
        self.step = state["step"]

    def token_loss_sum(self, ids, labels):
        """Sum over the labelled tokens of alpha * T^2 * KL(teacher || student) + (1 - alpha) * CE."""
        T = self.cfg.temperature
        logits = self.student(ids)
        with torch.no_grad():
            t_logits = self.teacher(ids)
        keep = labels != -100
        s, t = logits[keep], t_logits[keep]
        kl = F.kl_div(F.log_softmax(s / T, -1), F.log_softmax(t / T, -1), log_target=True, reduction="sum") * T * T
        ce = F.cross_entropy(s, labels[keep], reduction="sum")
        return self.cfg.alpha * kl + (1 - self.cfg.alpha) * ce

    def train_step(self):
        micro = self.data.step_batches(self.step)
        num_tokens = torch.tensor(float(sum((y != -100).sum().item() for _, y in micro)))
        total = torch.zeros(())
        for i, (ids, labels) in enumerate(micro):
            self.student.set_requires_gradient_sync(i == len(micro) - 1)
            loss = self.token_loss_sum(ids, labels) / num_tokens
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(self.student.parameters(), self.cfg.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        dist.all_reduce(total)
        return {"loss": total.item() / self.world, "tokens": num_tokens.item()}

    def fit(self):
        while self.step < self.cfg.steps:
            logs = self.train_step()
            self.step += 1
            for cb in self.callbacks:
                cb.on_step_end(self, logs)
