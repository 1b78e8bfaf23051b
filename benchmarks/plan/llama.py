"""Train a decoder in the shape of Llama 3 with FSDP2, in the order of torchtitan: tensor
parallelism, checkpointing, FSDP.

One script for every configuration in published.yaml: what decides memory there is an option here
(float32 shards and bfloat16 compute, selective checkpointing that saves every second matrix
product, float32 logits in the loss, which blocks stay gathered). It runs as it is: `torchrun
--nproc-per-node 2 llama.py --size debug --sequence 64`, on CPU too.
"""

import argparse
import os
from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_collectives import DefaultReduceScatter
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    loss_parallel,
    parallelize_module,
)
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from torch.utils.data import DataLoader, IterableDataset

SIZES = {  # layers, width, heads, kv_heads, ffn, vocabulary
    "debug": (2, 64, 4, 2, 128, 256),
    "llama2-7b": (32, 4096, 32, 32, 11008, 32000),
    "llama2-13b": (40, 5120, 40, 40, 13824, 32000),
    "llama2-70b": (80, 8192, 64, 8, 28672, 32000),
    "olmo-7b": (32, 4096, 32, 32, 11008, 100352),
    "olmo-8b": (32, 4096, 32, 8, 14336, 100352),
    "olmo-13b": (40, 5120, 40, 40, 13824, 100352),
    "8b": (32, 4096, 32, 8, 14336, 128256),
    "70b": (80, 8192, 64, 8, 28672, 128256),
    "405b": (126, 16384, 128, 8, 53248, 128256),
}
ATTENTION = (
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
)
REDUCED = torch.ops._c10d_functional.reduce_scatter_tensor.default  # of tensor parallelism


class RMSNorm(nn.Module):
    """The norm in float32, operator by operator, as torchtitan had it until March 2025."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        normed = x.float() * torch.rsqrt(x.float().pow(2).mean(-1, keepdim=True) + 1e-5)
        return normed.type_as(x) * self.weight

    def reset_parameters(self) -> None:
        nn.init.ones_(self.weight)


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.head = width // heads
        self.copies = heads // kv_heads
        self.wq = nn.Linear(width, heads * self.head, bias=False)
        self.wk = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wv = nn.Linear(width, kv_heads * self.head, bias=False)
        self.wo = nn.Linear(heads * self.head, width, bias=False)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            linear(x).view(batch, length, -1, self.head) for linear in (self.wq, self.wk, self.wv)
        )
        q, k = rotated(q, rotations), rotated(k, rotations)
        k, v = (
            whole.repeat_interleave(self.copies, 2) if self.copies > 1 else whole
            for whole in (k, v)
        )
        mixed = F.scaled_dot_product_attention(
            *(part.transpose(1, 2) for part in (q, k, v)), is_causal=True
        )
        return self.wo(mixed.transpose(1, 2).reshape(batch, length, -1))


class FeedForward(nn.Module):
    def __init__(self, width: int, ffn: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(width, ffn, bias=False)
        self.w2 = nn.Linear(ffn, width, bias=False)
        self.w3 = nn.Linear(width, ffn, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x)) * self.w3(x))


class Block(nn.Module):
    def __init__(self, width: int, heads: int, kv_heads: int, ffn: int, norm: Any) -> None:
        super().__init__()
        self.attention_norm, self.attention = norm(width), Attention(width, heads, kv_heads)
        self.ffn_norm, self.feed_forward = norm(width), FeedForward(width, ffn)

    def forward(self, x: Tensor, rotations: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotations)
        return x + self.feed_forward(self.ffn_norm(x))


class Decoder(nn.Module):
    rotations: Tensor

    def __init__(self, size: tuple[int, ...], sequence: int, norm: Any) -> None:
        super().__init__()
        layers, width, heads, kv_heads, ffn, vocabulary = size
        self.head, self.sequence = width // heads, sequence
        self.tok_embeddings = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(Block(width, heads, kv_heads, ffn, norm) for _ in range(layers))
        self.norm = norm(width)
        self.output = nn.Linear(width, vocabulary, bias=False)
        self.register_buffer(
            "rotations",
            torch.empty(sequence, self.head // 2, dtype=torch.complex64),
            persistent=False,
        )

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.tok_embeddings(tokens)
        for block in self.layers:
            x = block(x, self.rotations)
        return self.output(self.norm(x))

    @torch.no_grad()
    def init_weights(self) -> None:
        device = self.rotations.device
        angles = 500000.0 ** -(torch.arange(0, self.head, 2, device=device) / self.head)
        angles = torch.outer(torch.arange(self.sequence, device=device), angles)
        self.rotations.copy_(torch.polar(torch.ones_like(angles), angles))
        for module in self.modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=0.02)
            elif isinstance(module, RMSNorm | nn.RMSNorm):
                module.reset_parameters()


def rotated(x: Tensor, rotations: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.float().reshape(*x.shape[:-1], -1, 2))
    return torch.view_as_real(pairs * rotations[None, :, None]).flatten(3).type_as(x)


class RandomTokens(IterableDataset[Tensor]):
    def __init__(self, vocabulary: int, sequence: int, seed: int) -> None:
        self.vocabulary, self.sequence, self.seed = vocabulary, sequence, seed

    def __iter__(self) -> Iterator[Tensor]:
        generator = torch.Generator().manual_seed(self.seed)
        while True:
            yield torch.randint(self.vocabulary, (self.sequence + 1,), generator=generator)


def apply_tp(model: Decoder, mesh: DeviceMesh) -> None:
    """Tensor and sequence parallelism; the logits stay sharded over the vocabulary for the loss."""
    parallelize_module(
        model,
        mesh,
        {
            "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
            "norm": SequenceParallel(),
            "output": ColwiseParallel(
                input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False
            ),
        },
    )
    for block in model.layers:
        plan = {
            "attention_norm": SequenceParallel(),
            "attention": PrepareModuleInput(
                input_layouts=(Shard(1), None), desired_input_layouts=(Replicate(), None)
            ),
            **{f"attention.{name}": ColwiseParallel() for name in ("wq", "wk", "wv")},
            "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
            "ffn_norm": SequenceParallel(),
            "feed_forward": PrepareModuleInput(
                input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)
            ),
            "feed_forward.w1": ColwiseParallel(),
            "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
            "feed_forward.w3": ColwiseParallel(),
        }
        parallelize_module(block, mesh, plan)


def every_second_product(saves: Collection[Any]) -> Any:
    """Contexts that save some operators and every second matrix product, and recompute the rest."""
    products: dict[bool, int] = defaultdict(int)

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if operator == torch.ops.aten.mm.default:
            products[context.is_recompute] += 1
            saved = products[context.is_recompute] % 2 == 1
        else:
            saved = operator in saves
        return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE

    return create_selective_checkpoint_contexts(policy)


def apply_ac(model: Decoder, mode: str, reductions: bool) -> None:
    """`full`, `selective` (by operator, with `reductions` those of tensor parallelism too), or a
    number N: each Nth block as a whole.
    """
    saving = partial(every_second_product, (*ATTENTION, REDUCED) if reductions else ATTENTION)
    for number, block in enumerate(model.layers):
        if mode == "selective":
            wrapped = checkpoint_wrapper(block, context_fn=saving, preserve_rng_state=False)
        elif mode == "full" or (number + 1) % int(mode) == 0:
            wrapped = checkpoint_wrapper(block, preserve_rng_state=False)
        else:
            continue
        model.layers[number] = wrapped


def apply_fsdp(
    model: Decoder, mesh: DeviceMesh, reshard: str, split: bool, reduce_dtype: torch.dtype
) -> None:
    """Shard each block, and the rest with the root; `split` makes groups of the embedding and of
    the head too.
    """
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduce_dtype)
    always, never = reshard == "always", reshard == "never"
    if split:
        fully_shard(
            model.tok_embeddings, mesh=mesh, mp_policy=policy, reshard_after_forward=not never
        )
        fully_shard(
            [model.norm, model.output], mesh=mesh, mp_policy=policy, reshard_after_forward=always
        )
    for number, block in enumerate(model.layers):
        last = number == len(model.layers) - 1  # is needed again at once
        fully_shard(
            block, mesh=mesh, mp_policy=policy, reshard_after_forward=always or not (never or last)
        )
    # The root stays gathered between forward and backward, as in torch before 2.8, whatever was
    # asked for (pytorch/pytorch#154704).
    fully_shard(model, mesh=mesh, mp_policy=policy, reshard_after_forward=False)


class OnStream(DefaultReduceScatter):
    """Reduction buffers from a stream's own memory, as before torch 2.5 (pytorch/pytorch#129721,
    #132445).
    """

    def __init__(self, stream: torch.cuda.Stream) -> None:
        self.stream = stream

    def allocate(self, size: Any, *, dtype: torch.dtype, device: torch.device) -> Tensor:
        with torch.cuda.stream(self.stream):
            return super().allocate(size, dtype=dtype, device=device)


def mean_loss(logits: Tensor, labels: Tensor, chunks: int) -> Tensor:
    logits, labels = logits.flatten(0, 1), labels.flatten(0, 1)
    if chunks == 1:
        return F.cross_entropy(logits.float(), labels)
    parts = zip(logits.chunk(chunks), labels.chunk(chunks), strict=True)
    return sum(
        (F.cross_entropy(part.float(), target, reduction="sum") for part, target in parts),
        logits.new_zeros(()),
    ) / len(labels)


def arguments(given: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--size", default="debug", choices=SIZES)
    parser.add_argument("--layers", type=int, help="instead of those of the size")
    parser.add_argument("--batch", type=int, default=1, help="sequences of a rank in one step")
    parser.add_argument("--sequence", type=int, default=8192)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument(
        "--ac", default="selective", help="none, selective, full, or N: each Nth block"
    )
    parser.add_argument(
        "--recompute-reductions",
        action="store_true",
        help="of tensor parallelism, with --ac selective",
    )
    parser.add_argument("--tp", type=int, default=1)
    parser.add_argument("--dp-replicate", type=int, default=1)
    parser.add_argument("--reshard", default="default", choices=("default", "always", "never"))
    parser.add_argument(
        "--split", action="store_true", help="groups of their own for the embedding and the head"
    )
    parser.add_argument("--loss-chunks", type=int, default=1)
    parser.add_argument(
        "--keep-logits", action="store_true", help="in float32, until the next step"
    )
    parser.add_argument("--norm", default="native", choices=("native", "composed"))
    parser.add_argument("--adamw", default="fused", choices=("fused", "foreach", "loop"))
    parser.add_argument(
        "--reduce-on-stream",
        action="store_true",
        help="allocate for it as before torch 2.5; needs CUDA",
    )
    parser.add_argument("--reduce-dtype", default="float32", choices=("float32", "bfloat16"))
    return parser.parse_args(given)


def main() -> None:
    args = arguments()
    device = torch.device(
        "cuda" if torch.cuda.is_available() else "cpu", int(os.environ["LOCAL_RANK"])
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    world = dist.get_world_size()
    shape = {
        "dp_replicate": args.dp_replicate,
        "dp_shard": world // (args.dp_replicate * args.tp),
        "tp": args.tp,
    }
    used = {name: size for name, size in shape.items() if size > 1 or name == "dp_shard"}
    mesh = init_device_mesh(device.type, tuple(used.values()), mesh_dim_names=tuple(used))

    torch.manual_seed(0)
    size = SIZES[args.size] if args.layers is None else (args.layers, *SIZES[args.size][1:])
    with torch.device("meta"):
        model = Decoder(
            size,
            args.sequence,
            RMSNorm if args.norm == "composed" else partial(nn.RMSNorm, eps=1e-5),
        )
    if args.tp > 1:
        apply_tp(model, mesh["tp"])
    if args.ac != "none":
        apply_ac(model, args.ac, not args.recompute_reductions)
    dims = tuple(name for name in used if name != "tp")
    apply_fsdp(model, mesh[dims], args.reshard, args.split, getattr(torch, args.reduce_dtype))
    if args.reduce_on_stream:
        reduction = OnStream(torch.cuda.Stream())
        for module in model.modules():
            if isinstance(module, FSDPModule):
                module.set_custom_reduce_scatter(reduction)
    model.to_empty(device=device.type)
    model.init_weights()

    fused, foreach = args.adamw == "fused", args.adamw == "foreach"
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=3e-4,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=fused,
        foreach=foreach,
    )
    data = iter(
        DataLoader(
            RandomTokens(size[-1], args.sequence, dist.get_rank() // args.tp), batch_size=args.batch
        )
    )
    for step in range(1, args.steps + 1):
        tokens = next(data).to(device.type)
        optimizer.zero_grad()
        with loss_parallel() if args.tp > 1 else nullcontext():
            logits = model(tokens[:, :-1])
            if args.keep_logits:
                logits = logits.float()
            loss = mean_loss(logits, tokens[:, 1:], args.loss_chunks)
            if not args.keep_logits:
                del logits  # its memory is needed by the backward
            loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
        norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
        optimizer.step()
        if dist.get_rank() == 0:
            print(f"step {step}  loss {loss.item():.4f}  grad_norm {norm.item():.4f}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
