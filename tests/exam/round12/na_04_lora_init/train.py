"""LoRA fine-tuning of a frozen decoder. The base weights come from the base seed, adapters are initialised once the model is sharded."""
import dataclasses
import glob
import os
import sys

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor


@dataclasses.dataclass
class Config:
    vocab: int = 36
    dim: int = 32
    layers: int = 2
    ctx: int = 16
    rank: int = 8
    alpha: float = 16.0
    steps: int = 20
    batch: int = 16
    lr: float = 1e-2
    base_seed: int = 100
    adapter_seed: int = 7
    out: str = ""
    save_every: int = 0
    resume: str = ""

    @classmethod
    def from_argv(cls, argv):
        cfg = cls()
        for arg in argv:  # --name=value
            name, _, value = arg.lstrip("-").partition("=")
            name = name.replace("-", "_")
            setattr(cfg, name, type(getattr(cfg, name))(value))
        return cfg


class LoRALinear(nn.Module):
    def __init__(self, n_in, n_out, r, alpha):
        super().__init__()
        self.base = nn.Linear(n_in, n_out, bias=False)
        self.base.weight.requires_grad_(False)
        self.lora_a = nn.Parameter(torch.empty(r, n_in))
        self.lora_b = nn.Parameter(torch.zeros(n_out, r))
        self.scale = alpha / r

    def forward(self, x):
        return self.base(x) + F.linear(F.linear(x, self.lora_a), self.lora_b) * self.scale


class Block(nn.Module):
    def __init__(self, c):
        super().__init__()
        lin = lambda i, o: LoRALinear(i, o, c.rank, c.alpha)
        self.q, self.k, self.v, self.o = (lin(c.dim, c.dim) for _ in range(4))
        self.up, self.down = lin(c.dim, 2 * c.dim), lin(2 * c.dim, c.dim)

    def forward(self, x):
        n = F.rms_norm(x, x.shape[-1:])
        att = F.scaled_dot_product_attention(self.q(n), self.k(n), self.v(n), is_causal=True)
        x = x + self.o(att)
        return x + self.down(F.gelu(self.up(F.rms_norm(x, x.shape[-1:]))))


class Decoder(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.emb = nn.Embedding(c.vocab, c.dim)
        self.pos = nn.Embedding(c.ctx, c.dim)
        self.emb.requires_grad_(False)
        self.pos.requires_grad_(False)
        self.blocks = nn.ModuleList(Block(c) for _ in range(c.layers))
        self.head = LoRALinear(c.dim, c.vocab, c.rank, c.alpha)

    def forward(self, ids):
        x = self.emb(ids) + self.pos(torch.arange(ids.shape[1]))
        for b in self.blocks:
            x = b(x)
        return self.head(F.rms_norm(x, x.shape[-1:]))


@torch.no_grad()
def init_adapters(model, seed):
    """A is normal with variance 1 / fan-in; B stays zero, so the first forward is that of the base model."""
    gen = torch.Generator().manual_seed(seed)
    for name, p in model.named_parameters():
        if name.endswith("lora_a"):
            values = distribute_tensor(torch.randn(p.shape, generator=gen), p.device_mesh, p.placements).to_local()
            p.to_local().copy_(values * p.shape[1] ** -0.5)


def dialogue(cfg, step):
    """Replies repeat the user's turn in reverse; loss on the reply only."""
    g = torch.Generator().manual_seed(50 + step)
    half = cfg.ctx // 2
    turn = torch.randint(2, cfg.vocab, (cfg.batch, half), generator=g) // 4 * 4 + 2
    ids = torch.cat([turn, turn.flip(1)], 1) % cfg.vocab
    target = ids.roll(-1, 1)
    target[:, :half - 1] = -100
    target[:, -1] = -100
    return ids, target


def main():
    cfg = Config.from_argv(sys.argv[1:])
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(cfg.base_seed)
    model = Decoder(cfg)
    for b in model.blocks:
        fully_shard(b)
    fully_shard(model)
    init_adapters(model, cfg.adapter_seed)
    opt = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=cfg.lr, weight_decay=0.01)

    def adapters_only():
        m, o = get_state_dict(model, opt, options=StateDictOptions(ignore_frozen_params=True))
        return {"adapters": m, "optim": o}

    step = 0
    saved = sorted(glob.glob(os.path.join(cfg.resume, "adapters-*"))) if cfg.resume else []
    if saved:
        state = adapters_only()
        dcp.load(state, checkpoint_id=saved[-1])
        set_state_dict(model, opt, model_state_dict=state["adapters"], optim_state_dict=state["optim"],
                       options=StateDictOptions(strict=False, ignore_frozen_params=True))
        step = int(saved[-1].rsplit("-", 1)[1])

    per = cfg.batch // world
    while step < cfg.steps:
        ids, target = dialogue(cfg, step)
        ids, target = ids[rank * per:][:per], target[rank * per:][:per]
        loss = F.cross_entropy(model(ids).flatten(0, 1), target.flatten(), ignore_index=-100)
        loss.backward()
        opt.step()
        opt.zero_grad()
        step += 1
        mean = loss.detach() / world
        dist.all_reduce(mean)
        if rank == 0 and (step == 1 or step % 5 == 0):
            print(f"step {step} loss {mean.item():.4f}", flush=True)
        if cfg.out and cfg.save_every and step % cfg.save_every == 0:
            dcp.save(adapters_only(), checkpoint_id=os.path.join(cfg.out, f"adapters-{step:04d}"))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
