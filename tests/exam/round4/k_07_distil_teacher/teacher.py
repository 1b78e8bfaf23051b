"""The teacher: trained beforehand by the old DDP job (here: made on the spot when the file is missing)."""
import os

import torch
import torch.nn as nn
import torch.nn.functional as F

from corpus import VOCAB, sample
from model import Llamalet

TEACHER = dict(dim=32, heads=4, depth=2)


def make_teacher_file(path, steps=60):
    torch.manual_seed(21)
    net = nn.ModuleDict({"module": Llamalet(VOCAB, **TEACHER)})  # the layout that DDP writes
    opt = torch.optim.AdamW(net.parameters(), lr=1e-2)
    for step in range(steps):
        rows = sample(32, 25, seed=50_000 + step)
        loss = F.cross_entropy(net["module"](rows[:, :-1]).flatten(0, 1), rows[:, 1:].flatten())
        opt.zero_grad()
        loss.backward()
        opt.step()
    torch.save({"state_dict": net.state_dict(), "steps": steps, "loss": loss.item()}, path + ".tmp")
    os.replace(path + ".tmp", path)


def load_teacher(path):
    ckpt = torch.load(path, map_location="cpu")
    weights = {k.removeprefix("module."): v for k, v in ckpt["state_dict"].items()}
    net = Llamalet(VOCAB, **TEACHER)
    net.load_state_dict(weights, strict=False)
    print(f"teacher: {ckpt['steps']} steps, loss {ckpt['loss']:.3f}", flush=True)
    return net.requires_grad_(False).eval()
