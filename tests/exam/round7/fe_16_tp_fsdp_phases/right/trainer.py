import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh

from model import build
from optim import ClippedAdam


class Table:
    def __init__(self, cfg):
        self.cfg = cfg
        g = torch.Generator().manual_seed(cfg.seed)
        self.mix = torch.randn(6, cfg.features, generator=g)
        self.centers = 1.5 * torch.randn(cfg.classes, 6, generator=g)

    def rows(self, key, count):
        g = torch.Generator().manual_seed(key)
        y = torch.randint(self.cfg.classes, (count,), generator=g)
        x = (self.centers[y] + torch.randn(count, 6, generator=g)) @ self.mix
        mask = torch.rand(count, self.cfg.features, generator=g) < 0.25
        return x / 3, y, mask


class Trainer:
    def __init__(self, cfg):
        self.cfg = cfg
        world = dist.get_world_size()
        tp = cfg.tp if world % cfg.tp == 0 else 1
        self.mesh = init_device_mesh("cpu", (world // tp, tp), mesh_dim_names=("dp", "tp"))
        self.dp_rank, self.dp_size = self.mesh["dp"].get_local_rank(), self.mesh["dp"].size()
        self.dp_group = self.mesh.get_group("dp")
        self.model = build(cfg, self.mesh)
        self.table = Table(cfg)
        self.step, self.phase_start = 0, 0
        self.metrics = []
        self.enter_phase(0)

    def enter_phase(self, index):
        self.phase_index, self.phase = index, self.cfg.phases[index]
        for part, module in self.model.named_children():
            module.requires_grad_(part in self.phase.train)
        self.optimizer = ClippedAdam([p for p in self.model.parameters() if p.requires_grad], lr=self.phase.lr)

    def losses(self, x, y, mask):
        """One loss per row."""
        if self.phase.task == "reconstruct":
            out = self.model(x.masked_fill(mask, 0.0), "reconstruct")
            return (out - x).square().mean(1)
        return F.cross_entropy(self.model(x, "classify"), y, reduction="none")

    def reduce(self, *values):
        values = torch.stack([v.detach().double() for v in values])
        dist.all_reduce(values, group=self.dp_group)
        return values

    def train_step(self):
        rows = self.table.rows(10 + self.step, self.cfg.batch)
        loss = self.losses(*(t[self.dp_rank::self.dp_size] for t in rows)).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1

    @torch.no_grad()
    def evaluate(self):
        # the number of rows is odd, so ranks have different numbers of them
        rows = [t[self.dp_rank::self.dp_size] for t in self.table.rows(5, self.cfg.eval_rows)]
        losses = self.losses(*rows)
        total, count = self.reduce(losses.sum(), torch.tensor(len(losses)))
        self.metrics.append((total / count).item())
        if dist.get_rank() == 0:
            print(f"{self.phase.name}: step {self.step} evaluation loss {self.metrics[-1]:.6f}", flush=True)

    def fit(self, save_every=0, out=None):
        while True:
            if self.step - self.phase_start == self.phase.steps:
                if self.phase_index + 1 == len(self.cfg.phases):
                    break
                self.phase_start = self.step
                self.enter_phase(self.phase_index + 1)
            self.train_step()
            if self.step % self.cfg.eval_every == 0:
                self.evaluate()
            if save_every and self.step % save_every == 0:
                self.save(os.path.join(out, f"{self.phase.name}-{self.step:04d}"))

    def progress(self):
        return {"step": self.step, "phase_index": self.phase_index, "phase_start": self.phase_start, "metrics": self.metrics}

    def save(self, path):
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        dcp.save({"model": model_sd, "optim": optim_sd}, checkpoint_id=path)
        if dist.get_rank() == 0:
            torch.save(self.progress(), os.path.join(path, "progress.pt"))
        dist.barrier()

    def resume(self, folder):
        path = os.path.join(folder, max(os.listdir(folder), key=lambda name: name.split("-")[1]))
        progress = torch.load(os.path.join(path, "progress.pt"))
        # the optimizer of the saved phase must exist before its state can be read
        self.enter_phase(progress["phase_index"])
        model_sd, optim_sd = get_state_dict(self.model, self.optimizer)
        state = {"model": model_sd, "optim": optim_sd}
        dcp.load(state, checkpoint_id=path)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        self.step, self.phase_start, self.metrics = progress["step"], progress["phase_start"], progress["metrics"]
