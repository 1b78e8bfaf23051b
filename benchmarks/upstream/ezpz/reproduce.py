"""The initial weights and the gradient that ezpz's FSDP2 example gives to two ranks.

On CPU, by gloo:

torchrun --nproc-per-node 2 reproduce.py CHECKOUT_OF_EZPZ
"""

import logging
import os
import sys
from pathlib import Path

os.environ |= {"TORCH_DEVICE": "cpu", "TORCH_BACKEND": "gloo", "WANDB_MODE": "disabled"}
sys.path.insert(0, str(Path(sys.argv[1], "src")))
import ezpz
import torch
import torch.distributed as dist
from ezpz.examples.fsdp_tp import _compute_loss, parallelize
from ezpz.models.llama import ModelArgs, Transformer
from torch.distributed.tensor import DTensor

SIZES = ModelArgs(
    dim=32, n_layers=2, n_heads=4, vocab_size=128, multiple_of=16, batch_size=2, max_seq_len=16
)
rank = ezpz.distributed.setup_torch(seed=42)  # as main() of the example does with --seed 42
logging.disable(logging.INFO)


def build(replicate=1, shard=2):
    """Model and mesh as in train() of the example, in float32 (--fp32 --tp 1)."""
    mesh = ezpz.init_device_mesh_safe(
        "cpu", (replicate, shard, 1), mesh_dim_names=("dp_replicate", "dp_shard", "tp")
    )
    return parallelize(Transformer.from_model_args(SIZES), mesh, None)


def loss_of(model, tokens):
    return _compute_loss(model(tokens[:, :-1]), tokens[:, 1:])


def norm(model):
    total = torch.nn.utils.get_total_norm([weight.grad for weight in model.parameters()])
    return float(total.full_tensor() if isinstance(total, DTensor) else total)


def whole(model):
    return {name: weight.full_tensor().detach() for name, weight in model.named_parameters()}


def of_ranks(value):
    values = [None, None]
    dist.all_gather_object(values, value)
    return values


def show(*words):
    rank == 0 and print(*words, flush=True)


generator = torch.Generator().manual_seed(7)
batches = torch.randint(0, 128, (2, 2, 17), generator=generator)  # one batch for each rank

show("1. Initial weights, dp_replicate=2, dp_shard=1: each rank holds the whole model")
for seeds in ("setup_torch's seeds", "the same seed on both ranks"):
    if seeds.startswith("the same"):
        ezpz.seed_everything(42)
    model = build(replicate=2, shard=1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    name, weight = next(iter(model.named_parameters()))
    for step in range(6):
        local = weight.to_local().detach()
        sums = of_ranks(float(local.double().abs().sum()))
        first = local.clone()
        dist.broadcast(first, src=0)
        gap = max(of_ranks(float((first - local).abs().max())))
        if step in (0, 5):
            show(
                f"{seeds}, {step} steps: sum of |{name}| {sums[0]:.3f} on rank 0,"
                f" {sums[1]:.3f} on rank 1, largest difference {gap:.3f}"
            )
        loss_of(model, batches[rank]).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    losses = of_ranks(float(loss_of(model, batches[0]).detach()))
    show(f"{seeds}, loss of one batch: {losses[0]:.4f} on rank 0, {losses[1]:.4f} on rank 1")

show("2. Gradient, dp_shard=2")
for setting in ("1", "0"):
    os.environ["EZPZ_FSDP_GRAD_DIV"] = setting
    model = build()
    loss_of(model, batches[rank]).backward()
    reference = Transformer.from_model_args(SIZES)  # not sharded: the same weights, both batches
    reference.init_weights()
    reference.load_state_dict(whole(model), strict=False)
    loss_of(reference, batches.flatten(0, 1)).backward()
    ratio = norm(model) / norm(reference)
    show(
        f"EZPZ_FSDP_GRAD_DIV={setting}{' (default)' if setting == '1' else ''}: norm of the"
        f" gradient {norm(model):.5f}, of the mean loss's {norm(reference):.5f}, ratio {ratio:.4f}"
    )
dist.destroy_process_group()
