"""What verifier/source/migration.json says of torch, run on two ranks: `python migrate_claims.py FOLDER` prints {claim: whether it holds}.

Every function here that begins with `claim_` returns whether the sentence in its docstring holds on this rank.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffload,
    FSDPModule,
    MixedPrecision,
    MixedPrecisionPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from torch.distributed.tensor import DTensor
from torch.utils.data import DistributedSampler

WORLD = 2
FULL = StateDictOptions(full_state_dict=True, cpu_offload=True)
FROM_0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Block(nn.Module):
    """A layer."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.linear(x))


class Model(nn.Module):
    """Two blocks and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.head = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)

    def predict(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)


def model_of(seed: int = 0, shard: bool = True, **options: Any) -> Model:
    torch.manual_seed(seed)
    model = Model()
    if shard:
        for block in model.blocks:
            fully_shard(block, **options)
        fully_shard(model, **options)
    return model


def trained(model: nn.Module) -> torch.optim.Optimizer:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def raised(run: Callable[[], object]) -> bool:
    try:
        run()
    except Exception:
        return True
    return False


def claim_by_class() -> bool:
    """The loop that stands for an auto-wrap policy by class makes one group of each module of the class, and the root."""
    model = model_of(shard=False)
    for m in [m for m in reversed(list(model.modules())) if isinstance(m, Block)]:
        fully_shard(m)
    fully_shard(model)
    groups = [m for m in model.modules() if isinstance(m, FSDPModule)]
    return groups == [model, *model.blocks] and isinstance(model, Model)


def claim_stale_classes_are_taken() -> bool:
    """CPUOffload of FSDP1 is taken as offload_policy and ignored; MixedPrecision of FSDP1 is taken, and a forward fails."""
    offloaded = model_of(offload_policy=CPUOffload(offload_params=True))
    offloaded(torch.ones(2, 4)).sum().backward()
    lowered = model_of(mp_policy=MixedPrecision(param_dtype=torch.bfloat16))
    return raised(lambda: lowered(torch.ones(2, 4)))


def claim_ignored_params() -> bool:
    """A set of parameters is left out of the shards; a module in that set is ignored in silence."""
    model = model_of(shard=False)
    fully_shard(model, ignored_params={*model.head.parameters()})
    other = model_of(shard=False)
    fully_shard(other, ignored_params={other.head})  # type: ignore[arg-type]
    return not isinstance(model.head.weight, DTensor) and isinstance(other.head.weight, DTensor)


def claim_nothing_is_copied() -> bool:
    """Each rank keeps its part of its own weights."""
    rank = dist.get_rank()
    whole = model_of(seed=rank, shard=False).head.weight.detach()
    sharded = model_of(seed=rank).head.weight
    mine = sharded.to_local().detach()
    return torch.equal(mine, whole.chunk(WORLD)[rank]) and not torch.equal(sharded.full_tensor().detach(), whole)


def claim_weights_of_rank_0() -> bool:
    """Whole weights that only rank 0 has reach all ranks by broadcast_from_rank0."""
    source = model_of(seed=5, shard=False).state_dict()
    model = model_of(seed=dist.get_rank())
    set_model_state_dict(model, dict(source) if dist.get_rank() == 0 else {}, options=FROM_0)  # it writes into the dict
    whole = {name: p.full_tensor() for name, p in model.named_parameters()}
    return all(torch.equal(value, source[name]) for name, value in whole.items())


def claim_optimizer_before() -> bool:
    """An optimizer that was built before sharding changes nothing, and nothing is raised."""
    model = model_of(shard=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    fully_shard(model)
    before = [p.full_tensor().clone() for p in model.parameters()]
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    after = [p.full_tensor() for p in model.parameters()]
    return all(torch.equal(new, old) for new, old in zip(after, before, strict=True))


def claim_gradient_sync_stays() -> bool:
    """set_requires_gradient_sync stays as it was set, and the last micro-batch reduces all."""
    model = model_of()
    x = torch.full((2, 4), 1.0 + dist.get_rank())
    model.set_requires_gradient_sync(False)
    model(x).sum().backward()
    model(x).sum().backward()
    silent = all(p.grad is None for p in model.parameters())
    model.set_requires_gradient_sync(True)
    model(x).sum().backward()
    accumulated = model.head.bias.grad.full_tensor()
    return silent and torch.equal(accumulated, torch.full((4,), 6.0))


def claim_norms() -> bool:
    """clip_grad_norm_ and get_total_norm give DTensors, whose full_tensor is the norm of the whole gradient."""
    model = model_of()
    model(torch.ones(2, 4)).sum().backward()
    whole = torch.cat([p.grad.full_tensor().flatten() for p in model.parameters()]).norm()
    total = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()])
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9)
    right = [torch.allclose(one.full_tensor(), whole) for one in (total, norm) if isinstance(one, DTensor)]
    return right == [True, True]


def claim_overflow() -> bool:
    """With GradScaler, an overflow in one rank's shard skips the step on all ranks."""
    model = model_of()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    scaler = torch.amp.GradScaler(device="cpu", init_scale=1.0)
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == 0:
        model.head.weight.grad.to_local().fill_(torch.inf)
    before = [p.to_local().clone() for p in model.parameters()]
    scaler.step(optimizer)
    scaler.update()
    kept = all(torch.equal(p.to_local(), old) for p, old in zip(model.parameters(), before, strict=True))
    return kept and scaler.get_scale() == 0.5


def claim_states() -> bool:
    """state_dict has shards; whole tensors with full_state_dict and cpu_offload are on rank 0 only; the set functions take them."""
    model = model_of()
    optimizer = trained(model)
    shards = all(isinstance(value, DTensor) for value in model.state_dict().values())
    whole = get_model_state_dict(model, options=FULL)
    moments = get_optimizer_state_dict(model, optimizer, options=FULL)
    on_0 = len(whole) == 6 if dist.get_rank() == 0 else not whole
    plain = not any(isinstance(value, DTensor) for value in whole.values())
    other = model_of(seed=3)
    second = trained(other)
    set_model_state_dict(other, whole, options=FROM_0)
    set_optimizer_state_dict(other, second, moments, options=FROM_0)
    same = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    first = get_optimizer_state_dict(model, optimizer)["state"]["head.weight"]["exp_avg"]
    again = get_optimizer_state_dict(other, second)["state"]["head.weight"]["exp_avg"]
    set_model_state_dict(other, get_model_state_dict(model))
    return shards and on_0 and plain and same and torch.equal(first.to_local(), again.to_local())


def claim_checkpoint() -> bool:
    """dcp.save, then get_state_dict, dcp.load in place and set_state_dict bring model and optimizer back."""
    folder = str(Path(sys.argv[1]) / "checkpoint")
    model = model_of()
    optimizer = trained(model)
    saved = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    dcp.save(saved, checkpoint_id=folder)
    other = model_of(seed=3)
    second = torch.optim.AdamW(other.parameters(), lr=0.1)
    state = dict(zip(("model", "optimizer"), get_state_dict(other, second), strict=True))
    nothing = dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    same = all(
        torch.equal(a.to_local(), b.to_local()) for a, b in zip(model.parameters(), other.parameters(), strict=True)
    )
    return nothing is None and same and len(second.state) == 6


def claim_methods() -> bool:
    """A method other than forward gathers nothing until it is registered."""
    model = model_of()
    fails = raised(lambda: model.predict(torch.ones(2, 4)))
    register_fsdp_forward_method(model, "predict")
    return fails and model.predict(torch.ones(2, 4)).shape == (2, 4)


def claim_options() -> bool:
    """The arguments and methods that are named all run: mesh, policies, prefetch, unused parameters, compiled blocks."""
    mesh = init_device_mesh("cpu", (1, WORLD), mesh_dim_names=("dp_replicate", "dp_shard"))
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = model_of(shard=False)
    for block in model.blocks:
        block.compile(backend="eager")
        fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    fully_shard(model, mesh=mesh, mp_policy=policy)
    first, second = model.blocks
    first.set_modules_to_forward_prefetch([second])
    second.set_modules_to_backward_prefetch([first])
    model.set_reduce_scatter_unused_params(True)
    model.set_all_reduce_hook(lambda tensor: None)
    model(torch.ones(2, 4)).sum().backward()
    names = [name for name, _ in model.named_parameters()]
    return names == [name for name, _ in Model().named_parameters()] and model.head.weight.grad.dtype == torch.float32


def claim_parts_of_the_data() -> bool:
    """A DistributedSampler, or a slice with the rank, gives each rank its part of the samples."""
    rank = dist.get_rank()
    sampler = DistributedSampler(range(8), shuffle=False)
    sampler.set_epoch(1)
    return list(sampler) == list(range(8))[rank::WORLD]


def run(rank: int, folder: Path) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(str(folder / "store"), WORLD)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    warnings.simplefilter("ignore")
    results = {}
    for name, claim in list(globals().items()):
        if name.startswith("claim_"):
            try:
                results[name] = bool(claim())
            except Exception as error:
                results[name] = f"{type(error).__name__}: {error}"[:300]
    (folder / f"{rank}.json").write_text(json.dumps(results), encoding="utf-8")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    place = Path(sys.argv[1])
    torch.multiprocessing.start_processes(run, args=(place,), nprocs=WORLD, start_method="fork")
    both = [json.loads((place / f"{rank}.json").read_text()) for rank in range(WORLD)]
    print(json.dumps({name: [one[name] for one in both] for name in both[0]}))
