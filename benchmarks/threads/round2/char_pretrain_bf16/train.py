"""Small gated-convolution language model, bf16 compute, gradient accumulation.

The distributed settings come from one config block, like in the large runs: compute
dtype, dtype of the gradient communication, accumulation steps.
"""
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

CONFIG = {
    "model": {"vocab": 32, "dim": 32, "layers": 3, "kernel": 4},
    "training": {"steps": 24, "global_batch": 32, "accumulation": 4, "seq": 12, "seed": 1,
                 "lr": 3e-3, "clip": 1.0},
    "distributed": {"dtype": "bf16", "communication_dtype": "fp32", "reshard_after_forward": True},
}

_DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def string_to_dtype(name):
    return _DTYPES[name]


def get_mixed_precision(dtype, communication_dtype=None):
    if communication_dtype is None:
        communication_dtype = dtype
    return MixedPrecisionPolicy(param_dtype=string_to_dtype(dtype),
                                reduce_dtype=string_to_dtype(communication_dtype))


class GatedConv(nn.Module):
    def __init__(self, dim, kernel):
        super().__init__()
        self.kernel = kernel
        self.norm = nn.LayerNorm(dim)
        self.inp = nn.Linear(dim, 2 * dim)
        self.conv = nn.Conv1d(dim, dim, kernel, groups=dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x):
        value, gate = self.inp(self.norm(x)).chunk(2, dim=-1)
        value = F.pad(value.transpose(1, 2), (self.kernel - 1, 0))
        value = self.conv(value).transpose(1, 2)
        return x + self.out(value * torch.sigmoid(gate))


class CharLM(nn.Module):
    def __init__(self, vocab, dim, layers, kernel):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(GatedConv(dim, kernel) for _ in range(layers))
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def wrap_model_for_distributed_training(model, cfg):
    policy = get_mixed_precision(cfg["dtype"], cfg["communication_dtype"])
    reshard = cfg["reshard_after_forward"]
    for block in model.blocks:
        fully_shard(block, mp_policy=policy, reshard_after_forward=reshard)
    fully_shard(model, mp_policy=policy, reshard_after_forward=reshard)
    return model


def text_batch(n, seq, vocab, seed):
    """Cyclic "words" of random period with a few typos; the whole batch on every rank."""
    gen = torch.Generator().manual_seed(seed)
    period = torch.randint(2, 5, (n, 1), generator=gen)
    start = torch.randint(vocab, (n, 1), generator=gen)
    tokens = (start + 5 * (torch.arange(seq + 1)[None] % period)) % vocab
    typo = torch.rand(n, seq + 1, generator=gen) < 0.03
    return torch.where(typo, torch.randint(vocab, (n, seq + 1), generator=gen), tokens)


def lm_loss(model, tokens):
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train(model, cfg, device):
    tr, vocab = cfg["training"], cfg["model"]["vocab"]
    rank, world = dist.get_rank(), dist.get_world_size()
    optimizer = torch.optim.AdamW(model.parameters(), lr=tr["lr"], betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, tr["steps"], tr["lr"] / 10)
    accumulation = tr["accumulation"]
    for step in range(tr["steps"]):
        batch = text_batch(tr["global_batch"], tr["seq"], vocab, tr["seed"] * 1000 + step)
        micro_batches = batch[rank::world].to(device).chunk(accumulation)
        running = torch.zeros((), device=device)
        for i, tokens in enumerate(micro_batches):
            model.set_requires_gradient_sync(i == accumulation - 1)
            loss = lm_loss(model, tokens) / accumulation
            loss.backward()
            running += loss.detach()
        norm = nn.utils.clip_grad_norm_(model.parameters(), tr["clip"])
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()

        dist.all_reduce(running)
        if rank == 0 and (step % 4 == 0 or step == tr["steps"] - 1):
            print(f"step {step:3d}  loss {running.item() / world:.5f}  "
                  f"grad norm {norm.full_tensor().item():.5f}", flush=True)


@torch.no_grad()
def evaluate(model, cfg, device, n=64):
    rank, world = dist.get_rank(), dist.get_world_size()
    model.eval()
    tokens = text_batch(n, cfg["training"]["seq"], cfg["model"]["vocab"], 999)[rank::world]
    loss = lm_loss(model, tokens.to(device))
    dist.all_reduce(loss)
    return loss.item() / world


def main():
    cuda = torch.cuda.is_available()
    dist.init_process_group("nccl" if cuda else "gloo")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)

    torch.manual_seed(CONFIG["training"]["seed"])
    model = CharLM(**CONFIG["model"]).to(device)
    wrap_model_for_distributed_training(model, CONFIG["distributed"])
    train(model, CONFIG, device)
    loss = evaluate(model, CONFIG, device)
    if dist.get_rank() == 0:
        print(f"held-out loss {loss:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
