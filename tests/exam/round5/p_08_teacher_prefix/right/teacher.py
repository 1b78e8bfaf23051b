import os
import tempfile

import torch
import torch.distributed as dist
import torch.nn.functional as F

from models import Classifier

CFG = dict(d=32, depth=3)


def inputs(n, seed):
    return torch.randn(n, 10, generator=torch.Generator().manual_seed(seed))


def labels(x):
    w = torch.randn(10, 6, generator=torch.Generator().manual_seed(4))
    return (x @ w + (x[:, :6] * x[:, 4:]).abs()).argmax(1)


def train_teacher(path):
    """The DDP job that produced the teacher: its file has DDP's names and an auxiliary head."""
    torch.manual_seed(8)
    net = Classifier(**CFG)
    opt = torch.optim.Adam(net.parameters(), lr=1e-2)
    for i in range(120):
        x = inputs(64, 500 + i)
        F.cross_entropy(net(x), labels(x)).backward()
        opt.step()
        opt.zero_grad()
    sd = {"module." + k: v for k, v in net.state_dict().items()}
    sd["module.aux.weight"] = torch.zeros(2, 32)
    torch.save({"state_dict": sd, "epoch": 120}, path)


def load_teacher(path):
    if dist.get_rank() == 0 and not os.path.exists(path):
        tmp = tempfile.NamedTemporaryFile(dir=os.path.dirname(os.path.abspath(path)), delete=False)
        train_teacher(tmp.name)
        os.replace(tmp.name, path)
    dist.barrier()
    state = torch.load(path, map_location="cpu")["state_dict"]
    state = {k.removeprefix("module."): v for k, v in state.items()}
    net = Classifier(**CFG)
    net.load_state_dict(state, strict=False)  # the aux head is not used here
    return net.eval().requires_grad_(False)
