"""What the rows of a migration say of torch, held against the torch that is installed; tests/claims.md runs their sentences."""

import inspect
import json
import re
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.distributed.fsdp as fsdp
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

from verified_fsdp2.verifier.source import migration
from verified_fsdp2.verifier.source.migration_loop import _STATES
from verified_fsdp2.verifier.source.migration_model import _DDP_ROWS, _SILENT, DDP_PARAMETERS, FSDP1_PARAMETERS

ROWS = json.loads(Path(migration.__file__).with_suffix(".json").read_text(encoding="utf-8"))
TEXTS = [row["fsdp2"] + " " + row.get("mind", "") for row in ROWS.values()]

# name as the rows write it: what it is
CALLED = {
    "fully_shard": fsdp.fully_shard,
    "MixedPrecisionPolicy": fsdp.MixedPrecisionPolicy,
    "CPUOffloadPolicy": fsdp.CPUOffloadPolicy,
    "CPUOffload": fsdp.CPUOffload,
    "register_fsdp_forward_method": fsdp.register_fsdp_forward_method,
    "StateDictOptions": dsd.StateDictOptions,
    "get_model_state_dict": dsd.get_model_state_dict,
    "set_model_state_dict": dsd.set_model_state_dict,
    "get_optimizer_state_dict": dsd.get_optimizer_state_dict,
    "set_optimizer_state_dict": dsd.set_optimizer_state_dict,
    "get_state_dict": dsd.get_state_dict,
    "dcp.save": dcp.save,
    "dcp.load": dcp.load,
    "init_device_mesh": init_device_mesh,
    "dist.init_process_group": dist.init_process_group,
    "DistributedSampler": torch.utils.data.DistributedSampler,
    "torch.amp.GradScaler": torch.amp.GradScaler,
    "torch.nn.utils.clip_grad_norm_": torch.nn.utils.clip_grad_norm_,
    "torch.nn.utils.get_total_norm": torch.nn.utils.get_total_norm,
    "torch.cuda.set_device": torch.cuda.set_device,
    "torch.manual_seed": torch.manual_seed,
    "torch.no_grad": torch.no_grad,
    "checkpoint_wrapper": checkpoint_wrapper,
    "model.set_requires_gradient_sync": fsdp.FSDPModule.set_requires_gradient_sync,
    "model.set_reduce_scatter_unused_params": fsdp.FSDPModule.set_reduce_scatter_unused_params,
    "module.set_modules_to_backward_prefetch": fsdp.FSDPModule.set_modules_to_backward_prefetch,
    "module.set_modules_to_forward_prefetch": fsdp.FSDPModule.set_modules_to_forward_prefetch,
    "sampler.set_epoch": torch.utils.data.DistributedSampler.set_epoch,
    "param.full_tensor": torch.distributed.tensor.DTensor.full_tensor,
    "norm.full_tensor": torch.distributed.tensor.DTensor.full_tensor,
    ".full_tensor": torch.distributed.tensor.DTensor.full_tensor,
    "model.to_empty": torch.nn.Module.to_empty,
    "model.modules": torch.nn.Module.modules,
    "model.parameters": torch.nn.Module.parameters,
    "module.parameters": torch.nn.Module.parameters,
    "model.state_dict": torch.nn.Module.state_dict,
    "block.compile": torch.nn.Module.compile,
    ".item": torch.Tensor.item,
}
# Python, placeholders, libraries that the tests of tests/libraries run, and words before a parenthesis.
OTHERS = {"isinstance", "list", "reversed", "model.$method", "$plain", "Accelerator", "FullyShardedDataParallelPlugin"}
OTHERS |= {"TrainingArguments", "ModelParallelStrategy"}
KEYWORDS = {
    "mesh": fsdp.fully_shard,
    "reshard_after_forward": fsdp.fully_shard,
    "mp_policy": fsdp.fully_shard,
    "offload_policy": fsdp.fully_shard,
    "ignored_params": fsdp.fully_shard,
    "param_dtype": fsdp.MixedPrecisionPolicy,
    "reduce_dtype": fsdp.MixedPrecisionPolicy,
    "mesh_dim_names": init_device_mesh,
    "options": dsd.get_model_state_dict,
    "full_state_dict": dsd.StateDictOptions,
    "cpu_offload": dsd.StateDictOptions,
    "broadcast_from_rank0": dsd.StateDictOptions,
    "checkpoint_id": dcp.save,
    "device": torch.amp.GradScaler,
    "sampler": torch.utils.data.DataLoader,
}
OTHER_KEYWORDS = {"fsdp_plugin", "fsdp_version", "fsdp", "fsdp_config", "strategy"}


def test_the_constructors_have_these_parameters() -> None:
    assert tuple(inspect.signature(fsdp.FullyShardedDataParallel).parameters) == FSDP1_PARAMETERS
    assert tuple(inspect.signature(DistributedDataParallel).parameters)[: len(DDP_PARAMETERS)] == DDP_PARAMETERS
    wrong = [
        name for name in FSDP1_PARAMETERS[1:] if not any(row.split("=")[0].startswith(f"FSDP {name}") for row in ROWS)
    ]
    assert wrong == []
    assert set(ROWS) >= _DDP_ROWS and {f"DDP {name}" for name in _SILENT} & set(ROWS) == set()
    assert {strategy.name for strategy in fsdp.ShardingStrategy} == {
        row.partition("=")[2] for row in ROWS if row.startswith("FSDP sharding_strategy=")
    }


def test_the_functions_of_fsdp1_are_there() -> None:
    own = {name for name in dir(fsdp.FullyShardedDataParallel) if name[0] != "_" and not hasattr(torch.nn.Module, name)}
    assert {name for name in own if "state_dict" in name} - {"get_state_dict_type"} <= set(_STATES)
    assert all(hasattr(fsdp.FullyShardedDataParallel, name) or hasattr(fsdp, name) for name in _STATES)


def test_every_function_that_a_row_calls_is_there() -> None:
    called = {name for text in TEXTS for name in re.findall(r"([\w.$]*\.?[\w$]+)\(", text)}
    assert called <= {*CALLED, *OTHERS}, "give the new one to CALLED"
    assert all(callable(CALLED[name]) for name in called - OTHERS)


def test_every_argument_that_a_row_gives_is_there() -> None:
    used = {name for text in TEXTS for name in re.findall(r"\b([a-z_0-9]+)=(?!=)", text)}
    assert used <= {*KEYWORDS, *OTHER_KEYWORDS}, "give the new one to KEYWORDS"
    assert [name for name in used - OTHER_KEYWORDS if name not in inspect.signature(KEYWORDS[name]).parameters] == []
