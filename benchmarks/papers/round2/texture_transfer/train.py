"""Transfer of a texture network to a new label set.

The trunk comes from an earlier task and stays as it is; its batch norm layers (scale and
shift, not the running statistics) and the new output layer are adapted.
"""
import logging
import math
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

log = logging.getLogger("transfer")

SIZE, CLASSES = 16, 6
TRAIN, VALID = 192, 96
BATCH, EPOCHS = 16, 4
LR, SEED = 1e-2, 31


class ConvUnit(nn.Module):
    def __init__(self, c_in, c_out, stride):
        super().__init__()
        self.conv = nn.Conv2d(c_in, c_out, 3, stride=stride, padding=1, bias=False)
        self.bn = nn.BatchNorm2d(c_out)
        self.short = nn.Conv2d(c_in, c_out, 1, stride=stride, bias=False)

    def forward(self, x):
        return F.relu(self.bn(self.conv(x)) + self.short(x))


class TextureNet(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.units = nn.ModuleList([ConvUnit(1, 8, 1), ConvUnit(8, 16, 2), ConvUnit(16, 24, 2)])
        self.classifier = nn.Linear(24, classes)

    def forward(self, x):
        for unit in self.units:
            x = unit(x)
        return self.classifier(x.mean((2, 3)))


def released_trunk():
    """State of the trunk after the source task."""
    g = torch.Generator().manual_seed(404)
    net = TextureNet(1)
    state = {}
    for name, t in net.units.state_dict().items():
        if name.endswith("running_var"):
            state[name] = 0.5 + torch.rand(t.shape, generator=g)
        elif name.endswith("running_mean"):
            state[name] = 0.2 * torch.randn(t.shape, generator=g)
        elif "bn" in name and name.endswith("weight"):
            state[name] = 0.8 + 0.4 * torch.rand(t.shape, generator=g)
        elif t.dim() > 1:
            state[name] = torch.randn(t.shape, generator=g) * math.sqrt(2.0 / t[0].numel())
        else:
            state[name] = t.clone()
    return state


def textures(count, seed):
    """Gratings: the class is the angle, frequency and phase are free."""
    g = torch.Generator().manual_seed(seed)
    label = torch.randint(0, CLASSES, (count,), generator=g)
    angle = label * math.pi / CLASSES + 0.08 * torch.randn(count, generator=g)
    freq = 0.7 + 0.8 * torch.rand(count, generator=g)
    phase = 2 * math.pi * torch.rand(count, generator=g)
    yy, xx = torch.meshgrid(torch.arange(SIZE), torch.arange(SIZE), indexing="ij")
    along = angle.cos().view(-1, 1, 1) * xx + angle.sin().view(-1, 1, 1) * yy
    image = torch.sin(freq.view(-1, 1, 1) * along + phase.view(-1, 1, 1))
    image = image + 0.2 * torch.randn(image.shape, generator=g)
    return image.unsqueeze(1), label


def select_trainable(model, patterns):
    for name, p in model.named_parameters():
        p.requires_grad_(any(key in name for key in patterns))


def set_mode(model):
    model.train()
    for m in model.modules():
        if isinstance(m, nn.BatchNorm2d):
            m.eval()  # keep the statistics of the source task


def accuracy(model, images, labels, rank, world):
    model.eval()
    with torch.no_grad():
        out = model(images[rank::world])
    hits = (out.argmax(-1) == labels[rank::world]).sum()
    nll = F.cross_entropy(out, labels[rank::world], reduction="sum")
    both = torch.stack([hits.float(), nll])
    dist.all_reduce(both)
    return (both / len(labels)).tolist()


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    logging.basicConfig(level=logging.INFO if rank == 0 else logging.WARNING, format="%(name)s %(message)s")

    torch.manual_seed(SEED)
    model = TextureNet(CLASSES)
    model.units.load_state_dict(released_trunk())
    select_trainable(model, ("bn.", "classifier."))
    model.to(device)

    mesh = init_device_mesh(device.type, (world,))
    for unit in model.units:
        fully_shard(unit, mesh=mesh)
    fully_shard(model, mesh=mesh)
    params = [p for p in model.parameters() if p.requires_grad]
    opt = torch.optim.AdamW(params, lr=LR, weight_decay=1e-4)
    per_epoch = TRAIN // BATCH
    sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS * per_epoch)

    x_train, y_train = (t.to(device) for t in textures(TRAIN, 1))
    x_valid, y_valid = (t.to(device) for t in textures(VALID, 2))
    n = BATCH // world
    for epoch in range(EPOCHS):
        set_mode(model)
        order = torch.randperm(TRAIN, generator=torch.Generator().manual_seed(SEED + epoch))
        mean = torch.zeros((), device=device)
        for i in range(per_epoch):
            own = order[i * BATCH + rank * n:i * BATCH + (rank + 1) * n].to(device)
            loss = F.cross_entropy(model(x_train[own]), y_train[own])
            loss.backward()
            opt.step()
            sched.step()
            opt.zero_grad()
            mean += loss.detach()
        dist.all_reduce(mean)
        acc, nll = accuracy(model, x_valid, y_valid, rank, world)
        log.info("epoch %d loss %.5f valid acc %.3f nll %.5f", epoch, mean.item() / (per_epoch * world), acc, nll)

    dist.destroy_process_group()


if __name__ == "__main__":
    main()
