"""What the rows of a migration say of torch, held against the torch that is installed;
tests/claims.md runs their sentences.
"""

import contextlib
import inspect
import json
import re
from operator import attrgetter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as dsd
import torch.distributed.fsdp as fsdp
from torch.distributed.algorithms._checkpoint import checkpoint_wrapper as wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from verified_fsdp2.verifier.source import migration
from verified_fsdp2.verifier.source.migration_loop import _STATES
from verified_fsdp2.verifier.source.migration_model import _SILENT, DDP_PARAMETERS, FSDP1_PARAMETERS

ROWS = json.loads(Path(migration.__file__).with_suffix(".json").read_text(encoding="utf-8"))
TEXTS = [row["fsdp2"] + " " + row.get("mind", "") for row in ROWS.values()]

PLACES = {  # where a name is looked up, by what the rows write before it
    "": (fsdp, dsd, torch.utils.data, torch.distributed.device_mesh, wrapper),
    "dcp": (dcp,),
    "dist": (dist,),
    "torch": (torch,),
    **dict.fromkeys(("model", "module"), (torch.nn.Module, fsdp.FSDPModule)),
    "block": (torch.nn.Module,),
    "sampler": (torch.utils.data.DistributedSampler,),
    **dict.fromkeys(("param", "norm"), (DTensor,)),
}


def called(name: str) -> Any:
    """What a row calls by this name; None if torch has no such thing."""
    first, _, rest = name.rpartition(".") if name.startswith(".") else name.partition(".")
    places = (
        (DTensor, torch.Tensor) if name.startswith(".") else PLACES.get(first if rest else "", ())
    )
    for place in places:
        with contextlib.suppress(AttributeError):
            return attrgetter(rest or first)(place)
    return None


# Python, placeholders, libraries that the tests of tests/libraries run, and words before a
# parenthesis.
OTHERS = {
    "isinstance",
    "list",
    "reversed",
    "model.$method",
    "$plain",
    "Accelerator",
    "FullyShardedDataParallelPlugin",
}
OTHERS |= {"TrainingArguments", "ModelParallelStrategy"}
KEYWORDS: dict[str, Any] = {
    **dict.fromkeys(("mesh", "reshard_after_forward", "mp_policy"), fsdp.fully_shard),
    **dict.fromkeys(("offload_policy", "ignored_params"), fsdp.fully_shard),
    **dict.fromkeys(("param_dtype", "reduce_dtype"), fsdp.MixedPrecisionPolicy),
    **dict.fromkeys(
        ("full_state_dict", "cpu_offload", "broadcast_from_rank0"), dsd.StateDictOptions
    ),
    "mesh_dim_names": init_device_mesh,
    "options": dsd.get_model_state_dict,
    "checkpoint_id": dcp.save,
    "device": torch.amp.GradScaler,
    "sampler": torch.utils.data.DataLoader,
}
OTHER_KEYWORDS = {"fsdp_plugin", "fsdp_version", "fsdp", "fsdp_config", "strategy"}


def test_the_constructors_have_these_parameters() -> None:
    assert tuple(inspect.signature(fsdp.FullyShardedDataParallel).parameters) == FSDP1_PARAMETERS
    assert (
        tuple(inspect.signature(DistributedDataParallel).parameters)[: len(DDP_PARAMETERS)]
        == DDP_PARAMETERS
    )
    starts = [row.split("=")[0] for row in ROWS]
    assert [
        name
        for name in FSDP1_PARAMETERS[1:]
        if not any(row.startswith(f"FSDP {name}") for row in starts)
    ] == []
    ddp = {f"DDP {name}" for name in DDP_PARAMETERS}
    assert ddp - set(ROWS) == {f"DDP {name}" for name in _SILENT}
    strategies = {
        row.partition("=")[2] for row in ROWS if row.startswith("FSDP sharding_strategy=")
    }
    assert {strategy.name for strategy in fsdp.ShardingStrategy} == strategies


def test_the_functions_of_fsdp1_are_there() -> None:
    own = {
        name
        for name in dir(fsdp.FullyShardedDataParallel)
        if name[0] != "_" and not hasattr(torch.nn.Module, name)
    }
    assert {name for name in own if "state_dict" in name} - {"get_state_dict_type"} <= set(_STATES)
    assert all(
        hasattr(fsdp.FullyShardedDataParallel, name) or hasattr(fsdp, name) for name in _STATES
    )


def test_every_function_that_a_row_calls_is_there() -> None:
    names = {name for text in TEXTS for name in re.findall(r"([\w.$]*\.?[\w$]+)\(", text)}
    assert [name for name in sorted(names - OTHERS) if not callable(called(name))] == []


def test_every_argument_that_a_row_gives_is_there() -> None:
    used = {name for text in TEXTS for name in re.findall(r"\b([a-z_0-9]+)=(?!=)", text)}
    assert used <= {*KEYWORDS, *OTHER_KEYWORDS}, "give the new one to KEYWORDS"
    assert [
        name
        for name in used - OTHER_KEYWORDS
        if name not in inspect.signature(KEYWORDS[name]).parameters
    ] == []
