"""The table to edit for a new version of torch: the versions on which fsdp2 was run, and every
private name that the probe uses.

A name that this torch lacks disables what needs it, and a `ProbeError` names it; it is never an
ImportError.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A private name: `path` is module:attributes; `on_instances` are attributes that only objects
    have.
    """

    path: str
    needed_by: str
    on_instances: tuple[str, ...] = ()
    since: tuple[int, int] = (2, 6)  # the version of torch that brought it


MEAN = 1.5  # of 1 and 2
# What gloo gives for that mean in `reduce_scatter_tensor`, on each version on which scripts were
# verified.
# Versions on which fsdp2 was run, with what their gloo makes of the average of 1 and 2: 3.0 is a
# sum (torch 2.7.1 to 2.15.0, each run).
VERSIONS = {
    "2.7.1": 3.0,
    "2.8.0": 3.0,
    "2.9.1": MEAN,
    "2.10.0": MEAN,
    "2.11.0": MEAN,
    "2.12.1": MEAN,
    "2.13.0": MEAN,
    "2.14.1": MEAN,
    "2.15.0": MEAN,
}

_SHARD = "torch.distributed.fsdp._fully_shard"

PARAM_GROUP = f"{_SHARD}._fsdp_param_group:FSDPParamGroup"
POST_BACKWARD = f"{PARAM_GROUP}.post_backward"
TO_SHARDED = f"{PARAM_GROUP}._to_sharded"
STATE = f"{_SHARD}._fsdp_state:FSDPState"
PRE_BACKWARD_HOOK = f"{STATE}._register_pre_backward_hook"
SHARDED_MESH = f"{_SHARD}._fsdp_common:FSDPMeshInfo"
REPLICATED_MESH = f"{_SHARD}._fsdp_common:DDPMeshInfo"
ROOT_FORWARD = f"{STATE}._root_pre_forward"
BEGUN_FORWARD = "iter_forward_root"  # of the context of a state: the root whose forward has begun
FLIGHT_RECORDER = "torch._C._distributed_c10d:_dump_fr_trace_json"
HASH_STORE, PREFIX_STORE = "torch.distributed:HashStore", "torch.distributed:PrefixStore"
DEFAULT_STORE = "torch.distributed.distributed_c10d:_get_default_store"
GET_STATE = "torch.distributed.fsdp:FSDPModule._get_fsdp_state"
PARAM = f"{_SHARD}._fsdp_param:FSDPParam"
SHARD_POSITION = "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
LEAVES = "torch.utils._pytree:tree_leaves"
LOADER_NEXT = "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__"
SAVED_DICT = "torch.distributed.checkpoint.state_dict_saver:_stateful_to_state_dict"
WRITING_PROCESS = (
    "torch.distributed.checkpoint._async_process_executor:_AsyncCheckpointProcess.save"
)
FUNCTIONAL = "torch.distributed._functional_collectives"
RESOLVE_GROUP = "torch.distributed.distributed_c10d:_resolve_process_group"
FAKE_STORE = "torch.testing._internal.distributed.fake_pg:FakeStore"
DTENSOR_PART = "_local_tensor"
TRANSFORM = "torch._C._functorch:peek_interpreter_stack"
AS_PLAIN = "torch._C:DisableTorchFunctionSubclass"
WAITED_PART = "elem"
NESTED_PART = "_values"
BUILTINS = "torch.jit._builtins"
FAKE_TENSOR = "torch._subclasses.fake_tensor:FakeTensor"
CURRENT_MODE = "torch._C:_get_dispatch_mode"
FAKE_MODE = "torch._C:_TorchDispatchModeKey.FAKE"
WRAPPER = "torch:Tensor._make_wrapper_subclass"
KERNELS = "py_kernels"
FLOP_FORMULAS = "torch.utils.flop_counter:flop_registry"
LAZY_INIT = "torch.cuda:_lazy_init"
CONSTRUCTORS = "torch.utils._device:_device_constructors"
ACCELERATOR = ("_get_accelerator", "_accelerator_getAccelerator")

TABLE = (
    Name(GET_STATE, "parameters of FSDP groups"),
    Name(
        STATE, "parameters of FSDP groups", ("_fsdp_param_groups", "_fsdp_param_group", "_modules")
    ),
    Name(
        PARAM_GROUP,
        "parameters of FSDP groups, reductions, traffic",
        (
            *(
                "fsdp_params",
                "mesh_info",
                "reduce_grads",
                "all_reduce_grads",
                "reduce_scatter_unused_params",
            ),
            *("_module_fqn", "_partial_reduce_output", "_reshard_after_forward", "is_unsharded"),
        ),
    ),
    Name(
        PARAM,
        "shards, their owners, unsynced gradients, gathered copies",
        (
            *(
                "sharded_param",
                "_module_info",
                "_param_fqn",
                "_unsharded_param",
                "unsharded_accumulated_grad",
            ),
            *("mesh_info", "fsdp_placement"),
        ),
    ),
    Name(POST_BACKWARD, "a reduction begins"),
    Name(TO_SHARDED, "a group is sharded again"),
    Name(PRE_BACKWARD_HOOK, "a wrapped module returns"),
    Name(SHARDED_MESH, "what a backward should cost"),
    Name(REPLICATED_MESH, "what a backward should cost"),
    Name(SHARD_POSITION, "sketches of shards"),
    Name("torch.distributed.tensor:DTensor", "the shard without a graph node", (DTENSOR_PART,)),
    Name("torch:Tensor", "views changed in place", ("_base", "_version")),
    Name("torch:autocast", "whether autocast is on", ("_enabled",)),
    Name("torch.nn:Module", "names of parameters", ("_parameters", "_buffers", "_apply")),
    Name(ROOT_FORWARD, "the guard: a forward begins"),
    Name(DEFAULT_STORE, "the guard: ranks compare"),
    Name(
        "torch.distributed:ProcessGroup._get_backend",
        "the guard: a hang is reported before its collective ends",
        ("_device_types",),
    ),
    Name(LEAVES, "samples of a forward"),
    Name(LOADER_NEXT, "batches that a loader gives"),
    Name(SAVED_DICT, "what a DCP save takes"),
    Name(WRITING_PROCESS, "saves by a process of DCP", since=(2, 7)),
    Name(FUNCTIONAL, "traffic"),
    Name(FAKE_STORE, "the simulated tier"),
    Name(AS_PLAIN, "reads of replaced parameters"),
    Name(TRANSFORM, "transforms of torch.func"),
    Name(BUILTINS, "functions of TorchScript", ("_builtin_table",)),
    Name(LAZY_INIT, "CUDA on the CPU"),
    Name(FLOP_FORMULAS, "capacity runs"),
    Name(RESOLVE_GROUP, "capacity runs"),
    *(Name(one, "CUDA on the CPU") for one in (WRAPPER, FAKE_TENSOR, CURRENT_MODE, FAKE_MODE)),
    Name(CONSTRUCTORS, "the default device"),
    Name("torch._C", "CUDA on the CPU", ACCELERATOR),
    Name("torch._dynamo", "any optimizer: over a second to import"),
)


def averages(torch: str) -> bool:
    """Whether gloo of this version of torch is known to average; on others the probe averages in
    its place.
    """
    return VERSIONS.get(torch.partition("+")[0]) == MEAN


def runs_on_cpu(torch: str) -> bool:
    """Whether FSDP2 of this version of torch trains on the CPU: 2.6 stops in the first forward or
    backward, 2.7 does not.
    """
    return _minor(torch) >= (2, 7)


def replicates_on_cpu(torch: str) -> bool:
    """Whether HSDP of this version of torch trains on the CPU: 2.7 stops in the first backward, 2.8
    does not.
    """
    return _minor(torch) >= (2, 8)


def _minor(torch: str) -> tuple[int, int]:
    major, minor = torch.split(".")[:2]
    return int(major), int(minor)


class MissingName(Exception):
    """This torch lacks a private name. `symbol`: its path."""

    def __init__(self, symbol: str) -> None:
        super().__init__(f"this torch has no {symbol}")
        self.symbol = symbol


def find(path: str) -> Any:
    """What `module:attributes` names (the module itself without attributes), None if this torch
    lacks it.
    """
    module, _, attributes = path.partition(":")
    try:
        found = importlib.import_module(module)
        for name in attributes.split(".") if attributes else ():
            found = getattr(found, name)
    except (ImportError, AttributeError):
        return None
    return found


def need(path: str) -> Any:
    """What `module:attributes` names. Raises MissingName."""
    if (found := find(path)) is None:
        raise MissingName(path.replace(":", "."))
    return found


def missing() -> list[Name]:
    """The names of the table that this torch lacks.

    It imports every module of the table, as a launcher does before it forks.
    """
    version = _minor(importlib.import_module("torch").__version__)
    there = [name for name in TABLE if name.since <= version]
    return [name for name in there if find(name.path) is None]


def keep_constructors() -> None:
    """Before the first patch: torch lists the functions that obey `set_default_device` once, by
    identity.
    """
    need(CONSTRUCTORS)()


def forget_builtins() -> None:
    """Let TorchScript make its table of functions again: it knows them by identity, and some have
    been patched.
    """
    if (module := find(BUILTINS)) is not None:
        module._builtin_table = None
