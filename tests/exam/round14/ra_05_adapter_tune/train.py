"""Topic classifier over bags of words; all weights, or low-rank adapters only (lora > 0)."""
import sys
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
import yaml
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

WORDS, TOPICS = 160, 8


class Adapted(nn.Module):
    """A linear layer with a low-rank term beside it."""

    def __init__(self, base, rank, alpha):
        super().__init__()
        self.base, self.scale = base, alpha / rank
        self.down = nn.Parameter(torch.randn(rank, base.in_features) * 0.1)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.down), self.up) * self.scale


class Topics(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.first, self.second = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.head = nn.Linear(width, TOPICS)

    def forward(self, bags):
        x = self.words(bags).mean(1) * 4
        return self.head(x + self.second(F.gelu(self.first(x))))


def bags(step, cfg):
    g = torch.Generator().manual_seed(900 + step)
    topic = torch.randint(TOPICS, (cfg["batch"],), generator=g)
    own = topic.unsqueeze(1) * 20 + torch.randint(26, (cfg["batch"], 5), generator=g)
    other = torch.randint(WORDS, (cfg["batch"], 7), generator=g)
    return torch.cat([own % WORDS, other], dim=1), topic


def build(cfg):
    torch.manual_seed(cfg["seed"] or 1)
    model = Topics()
    adapters = []
    if cfg["lora"]:
        model.requires_grad_(False)
        for name in ("first", "second"):
            layer = Adapted(getattr(model, name), cfg["lora"], cfg["alpha"])
            adapters += [layer.down, layer.up]
            setattr(model, name, layer)
    if torch.cuda.is_available():
        torch.set_float32_matmul_precision("high")
    # adapters are small: every rank keeps them whole
    fully_shard(model, ignored_params=set(adapters))
    return model, adapters


def average_gradients(adapters):
    for p in adapters:
        dist.all_reduce(p.grad)
        p.grad /= dist.get_world_size()


@torch.no_grad()
def export_words(model, cfg):
    """Word vectors of length one, for the nearest-neighbour index."""
    weight = model.words.weight
    weight = weight / weight.norm(dim=1, keepdim=True)
    table = weight.full_tensor()
    if dist.get_rank() == 0:
        print(f"word vectors: {tuple(table.shape)}, sum {table.double().sum().item():.6f}", flush=True)
        if cfg["export"]:
            torch.save(table, cfg["export"])


def bundle(model, optimizer, step):
    weights, optim = get_state_dict(model, optimizer)
    return {"weights": weights, "optim": optim, "step": step}


def train(cfg):
    rank, world = dist.get_rank(), dist.get_world_size()
    model, adapters = build(cfg)
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(trained, lr=cfg["rate"], momentum=cfg["momentum"])
    step = 0
    if cfg["resume"]:
        state = bundle(model, optimizer, 0)
        dcp.load(state, checkpoint_id=cfg["resume"])
        set_state_dict(
            model, optimizer, model_state_dict=state["weights"], optim_state_dict=state["optim"]
        )
        step = state["step"]
    while step < cfg["steps"]:
        x, y = (t[rank::world] for t in bags(step, cfg))
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        average_gradients(adapters)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % 12 == 0:
            mean = loss.detach().clone()
            dist.all_reduce(mean)
            if rank == 0:
                print(f"step {step} loss {mean.item() / world:.5f}", flush=True)
        if step == cfg["export_at"]:
            export_words(model, cfg)
        if step == cfg["save_at"]:
            dcp.save(bundle(model, optimizer, step), checkpoint_id=cfg["folder"])


def main():
    cfg = yaml.safe_load(Path(__file__).with_name("config.yaml").read_text())
    for word in sys.argv[1:]:
        key, value = word.split("=", 1)
        cfg[key] = yaml.safe_load(value)
    dist.init_process_group("gloo")
    train(cfg)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
