"""Checkpoints in the background: the state is copied at once, written by a thread with a process group of its own,
and made visible (pointer files) only when it is complete."""

import copy
import json
import shutil
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.tensor import DTensor


def frozen(tree):
    """A private copy of all tensors in a nested state dict."""
    if isinstance(tree, dict):
        return {k: frozen(v) for k, v in tree.items()}
    if isinstance(tree, (list, tuple)):
        return type(tree)(frozen(v) for v in tree)
    if isinstance(tree, (torch.Tensor, DTensor)):
        return tree.detach().clone()
    return copy.deepcopy(tree)


class BackgroundSaver:
    def __init__(self, root, keep=4):
        self.root, self.keep = Path(root), keep
        self.group = dist.new_group(backend="gloo")
        self.pending, self.done, self.best = None, [], None

    def submit(self, step, model, optim, info, score=None):
        self.settle()
        m, o = get_state_dict(model, optim)
        path = self.root / f"at_{step:04d}"
        future = dcp.async_save(
            frozen({"model": m, "optim": o, "info": info}), checkpoint_id=path, process_group=self.group
        )
        self.pending = (future, path, step, score)

    def settle(self):
        """Wait for the write under way and publish it. Every rank comes here at the same steps."""
        if self.pending is None:
            return
        future, path, step, score = self.pending
        future.result()
        self.pending = None
        dist.barrier(group=self.group)
        self.done.append(path)
        if score is not None and (self.best is None or score < self.best[0]):
            self.best = (score, path)
        keepers = set(self.done[-self.keep :]) | ({self.best[1]} if self.best else set())
        stale, self.done = [p for p in self.done if p not in keepers], [p for p in self.done if p in keepers]
        if dist.get_rank() == 0:
            index = {"last": path.name, "best": self.best and self.best[1].name}
            tmp = self.root / "index.tmp"
            tmp.write_text(json.dumps(index))
            tmp.replace(self.root / "index.json")
            for p in stale:
                shutil.rmtree(p)


def restore(root, model, optim, which="last"):
    name = json.loads((Path(root) / "index.json").read_text())[which]
    m, o = get_state_dict(model, optim)
    state = {"model": m, "optim": o, "info": {"step": 0, "draws": 0}}
    dcp.load(state, checkpoint_id=Path(root) / name)
    set_state_dict(model, optim, model_state_dict=state["model"], optim_state_dict=state["optim"])
    return state["info"]
