"""Checkpoints written by a background thread, one file per rank and kind."""
import os
import queue
import threading

import torch
from torch.distributed.tensor import DTensor


def _host(t):
    """The part of a tensor that this rank owns, in host memory."""
    if isinstance(t, DTensor):
        t = t.to_local()
    return t.detach().to("cpu", copy=True)


class AsyncSaver:
    def __init__(self, root, rank, world):
        self.root, self.rank, self.world = root, rank, world
        self.staged = []
        self.jobs = queue.Queue()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def save(self, step, model, opt):
        params = {n: _host(p) for n, p in model.named_parameters()}
        moments = {}
        for n, p in model.named_parameters():
            moments[n] = {k: _host(v) for k, v in opt.state[p].items()}
        # the ranks write one after the other: rank r starts r + 1 steps after the save
        self.staged.append((step + 1 + self.rank, (step, params, moments)))

    def poll(self, step):
        while self.staged and step >= self.staged[0][0]:
            self.jobs.put(self.staged.pop(0)[1])

    def _run(self):
        while True:
            job = self.jobs.get()
            if job is None:
                return
            step, params, moments = job
            folder = os.path.join(self.root, f"step_{step:06d}")
            os.makedirs(folder, exist_ok=True)
            for kind, payload in (("params", params), ("moments", moments)):
                torch.save(payload, os.path.join(folder, f"{kind}_{self.rank}.pt"))
            open(os.path.join(folder, f"done_{self.rank}"), "w").close()

    def close(self):
        for _, job in self.staged:
            self.jobs.put(job)
        self.jobs.put(None)
        self.thread.join()


def newest(root, world):
    for name in sorted(os.listdir(root), reverse=True):
        folder = os.path.join(root, name)
        if name.startswith("step_") and all(os.path.exists(os.path.join(folder, f"done_{r}")) for r in range(world)):
            if not os.path.exists(os.path.join(folder, f"done_{world}")):
                return folder
    raise FileNotFoundError(f"no complete checkpoint for {world} ranks in {root}")


@torch.no_grad()
def restore(root, model, opt, rank, world):
    folder = newest(root, world)
    params = torch.load(os.path.join(folder, f"params_{rank}.pt"))
    moments = torch.load(os.path.join(folder, f"moments_{rank}.pt"))
    for n, p in model.named_parameters():
        p.to_local().copy_(params[n])
        state = {}
        for k, v in moments[n].items():
            if k != "step":
                v = DTensor.from_local(v, p.device_mesh, p.placements, run_check=False,
                                       shape=p.shape, stride=p.stride())
            state[k] = v
        opt.state[p] = state
    return int(folder.rsplit("_", 1)[1])
