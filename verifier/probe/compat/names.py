"""Every private name of torch that the probe uses: the table to edit for a new version of torch.

A name that this torch lacks disables what needs it, and a `ProbeError` names it; it is never an ImportError.
"""

import importlib
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Name:
    """A private name: `path` is module:attributes; `on_instances` are attributes that only objects have."""

    path: str
    needed_by: str
    run_on: tuple[str, ...]
    on_instances: tuple[str, ...] = ()


_SHARD = "torch.distributed.fsdp._fully_shard"
_NEW = ("2.13.0",)
_BOTH = ("2.7.1", "2.13.0")

PARAM_GROUP = f"{_SHARD}._fsdp_param_group:FSDPParamGroup"
POST_BACKWARD = f"{PARAM_GROUP}.post_backward"
TO_SHARDED = f"{PARAM_GROUP}._to_sharded"
STATE = f"{_SHARD}._fsdp_state:FSDPState"
PRE_BACKWARD_HOOK = f"{STATE}._register_pre_backward_hook"
SHARDED_MESH = f"{_SHARD}._fsdp_common:FSDPMeshInfo"
REPLICATED_MESH = f"{_SHARD}._fsdp_common:DDPMeshInfo"
GET_STATE = "torch.distributed.fsdp:FSDPModule._get_fsdp_state"
PARAM = f"{_SHARD}._fsdp_param:FSDPParam"
SHARD_POSITION = "torch.distributed.tensor._utils:compute_local_shape_and_global_offset"
LEAVES = "torch.utils._pytree:tree_leaves"
LOADER_NEXT = "torch.utils.data.dataloader:_BaseDataLoaderIter.__next__"
SAVED_DICT = "torch.distributed.checkpoint.state_dict_saver:_stateful_to_state_dict"
WRITING_PROCESS = "torch.distributed.checkpoint._async_process_executor:_AsyncCheckpointProcess.save"
FUNCTIONAL = "torch.distributed._functional_collectives"
FAKE_STORE = "torch.testing._internal.distributed.fake_pg:FakeStore"
DTENSOR_PART = "_local_tensor"
AS_PLAIN = "torch._C:DisableTorchFunctionSubclass"
WAITED_PART = "elem"
NESTED_PART = "_values"
BUILTINS = "torch.jit._builtins"
FAKE_TENSOR = "torch._subclasses.fake_tensor:FakeTensor"
CURRENT_MODE = "torch._C:_get_dispatch_mode"
FAKE_MODE = "torch._C:_TorchDispatchModeKey.FAKE"
WRAPPER = "torch:Tensor._make_wrapper_subclass"
KERNELS = "py_kernels"
LAZY_INIT = "torch.cuda:_lazy_init"
CONSTRUCTORS = "torch.utils._device:_device_constructors"
ACCELERATOR = ("_get_accelerator", "_accelerator_getAccelerator")

TABLE = (
    Name(GET_STATE, "parameters of FSDP groups", _BOTH),
    Name(STATE, "parameters of FSDP groups", _BOTH, ("_fsdp_param_groups", "_fsdp_param_group", "_modules")),
    Name(
        PARAM_GROUP,
        "parameters of FSDP groups, reductions, traffic",
        _BOTH,
        (
            *("fsdp_params", "mesh_info", "reduce_grads", "all_reduce_grads", "reduce_scatter_unused_params"),
            *("_module_fqn", "_partial_reduce_output", "_reshard_after_forward", "is_unsharded"),
        ),
    ),
    Name(
        PARAM,
        "shards, their owners, unsynced gradients, gathered copies",
        _BOTH,
        (
            *("sharded_param", "_module_info", "_param_fqn", "_unsharded_param", "unsharded_accumulated_grad"),
            *("mesh_info", "fsdp_placement"),
        ),
    ),
    Name(POST_BACKWARD, "a reduction begins", _NEW),
    Name(TO_SHARDED, "a group is sharded again", _NEW),
    Name(PRE_BACKWARD_HOOK, "a wrapped module returns", _NEW),
    Name(SHARDED_MESH, "what a backward should cost", _NEW),
    Name(REPLICATED_MESH, "what a backward should cost", _NEW),
    Name(SHARD_POSITION, "sketches of shards", _BOTH),
    Name("torch.distributed.tensor:DTensor", "the shard without a graph node", _BOTH, (DTENSOR_PART,)),
    Name("torch:Tensor", "views changed in place", _BOTH, ("_base", "_version")),
    Name("torch:autocast", "whether autocast is on", _BOTH, ("_enabled",)),
    Name("torch.nn:Module", "names of parameters", _BOTH, ("_parameters", "_buffers", "_apply")),
    Name(LEAVES, "samples of a forward", _BOTH),
    Name(LOADER_NEXT, "batches that a loader gives", _BOTH),
    Name(SAVED_DICT, "what a DCP save takes", _BOTH),
    Name(WRITING_PROCESS, "saves by a process of DCP", _NEW),
    Name(FUNCTIONAL, "traffic", _BOTH),
    Name(FAKE_STORE, "the simulated tier", _BOTH),
    Name(AS_PLAIN, "reads of replaced parameters", _NEW),
    Name(BUILTINS, "functions of TorchScript", _NEW, ("_builtin_table",)),
    Name(LAZY_INIT, "CUDA on the CPU", _NEW),
    *(Name(one, "CUDA on the CPU", _NEW) for one in (WRAPPER, FAKE_TENSOR, CURRENT_MODE, FAKE_MODE)),
    Name(CONSTRUCTORS, "CUDA on the CPU", _NEW),
    Name("torch._C", "CUDA on the CPU", _NEW, ACCELERATOR),
    Name("torch._dynamo", "any optimizer: over a second to import", _BOTH),
)


class MissingName(Exception):
    """This torch lacks a private name. `symbol`: its path."""

    def __init__(self, symbol: str) -> None:
        super().__init__(f"this torch has no {symbol}")
        self.symbol = symbol


def find(path: str) -> Any:
    """What `module:attributes` names (the module itself without attributes), None if this torch lacks it."""
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
    """The names of the table that this torch lacks. It imports every module of the table, as a launcher does before it forks."""
    return [name for name in TABLE if find(name.path) is None]


def forget_builtins() -> None:
    """Let TorchScript make its table of functions again: it knows them by identity, and some have been patched."""
    if (module := find(BUILTINS)) is not None:
        module._builtin_table = None
