"""Fine-tuning from the top: the head alone, then the upper layers, then all, with a pull of thawed weights to their start."""
import argparse
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

PHASES = [(0, ("head",), 2e-2), (8, ("layers.2", "layers.1"), 6e-3), (16, ("layers.0", "embed"), 3e-3)]
TOTAL = 26


class Layer(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def forward(self, x):
        return x + self.fc2(F.gelu(self.fc1(self.norm(x))))


class Classifier(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.embed = nn.Linear(10, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(3))
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Thawing:
    """Adds an optimizer group when a phase begins; keeps the start of each thawed weight."""

    def __init__(self, model, optimizer, pull=0.02):
        self.model, self.optimizer, self.pull = model, optimizer, pull
        self.begun, self.anchors = 0, {}

    def advance(self, step):
        while self.begun < len(PHASES) and PHASES[self.begun][0] <= step:
            _, prefixes, lr = PHASES[self.begun]
            fresh = {n: p for n, p in self.model.named_parameters() if n.startswith(prefixes)}
            for n, p in fresh.items():
                p.requires_grad_(True)
                if self.begun:
                    self.anchors[n] = p.detach().clone()
            self.optimizer.add_param_group({"params": list(fresh.values()), "lr": lr})
            self.begun += 1

    @torch.no_grad()
    def pull_back(self):
        params = dict(self.model.named_parameters())
        for n, anchor in self.anchors.items():
            params[n].lerp_(anchor, self.pull)


def build():
    torch.manual_seed(40)
    model = Classifier()
    model.requires_grad_(False)
    for layer in model.layers:
        fully_shard(layer)
    fully_shard(model)
    model.head.requires_grad_(True)
    optimizer = torch.optim.AdamW([{"params": list(model.head.parameters()), "lr": PHASES[0][2]}], eps=1e-5, weight_decay=0.0)
    thawing = Thawing(model, optimizer)
    thawing.begun = 1
    return model, optimizer, thawing


def batch(step, size=48):
    g = torch.Generator().manual_seed(2000 + step)
    x = torch.randn(size, 10, generator=g)
    y = torch.stack([x[:, 0] * x[:, 1], x[:, 2] + 0.5 * x[:, 3], x[:, 4].abs() - 0.8], 1).argmax(1)
    r, w = dist.get_rank(), dist.get_world_size()
    return x.chunk(w)[r], y.chunk(w)[r]


def pack(model, optimizer, thawing, step):
    weights, optim = get_state_dict(model, optimizer)
    return {"weights": weights, "optim": optim, "anchors": thawing.anchors, "step": step}


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--out")
    ap.add_argument("--save-every", type=int, default=0)
    ap.add_argument("--resume")
    args = ap.parse_args()
    dist.init_process_group("gloo")
    model, optimizer, thawing = build()
    step = 0
    if args.resume:
        name = max(os.listdir(args.resume))
        thawing.advance(int(name) - 1)
        state = pack(model, optimizer, thawing, 0)
        dcp.load(state, checkpoint_id=os.path.join(args.resume, name))
        set_state_dict(model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optim"])
        step = state["step"]
    while step < TOTAL:
        thawing.advance(step)
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        thawing.pull_back()
        step += 1
        if step % 4 == 0 or step == TOTAL:
            mean = loss.detach() / dist.get_world_size()
            dist.all_reduce(mean)
            if dist.get_rank() == 0:
                print(f"step {step:2d} phase {thawing.begun} loss {mean.item():.5f}", flush=True)
        if args.save_every and step % args.save_every == 0:
            dcp.save(pack(model, optimizer, thawing, step), checkpoint_id=os.path.join(args.out, f"{step:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
