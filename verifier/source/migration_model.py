"""What a migration changes about the model and its optimizer: the wrapper, argument by argument,
and what is done to it.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator

from .events import Event
from .flow_queries import is_const, made_by, text
from .migration_scene import DATA_PARALLEL, DDP, FSDP1, MODULE, Found, Scene, Table, rows
from .values import Value, choices, reach

# The parameters of the constructors, in their order on torch 2.13.0; all may be given by position.
FSDP1_PARAMETERS = (
    *(
        "module",
        "process_group",
        "sharding_strategy",
        "cpu_offload",
        "auto_wrap_policy",
        "backward_prefetch",
    ),
    *(
        "mixed_precision",
        "ignored_modules",
        "param_init_fn",
        "device_id",
        "sync_module_states",
        "forward_prefetch",
    ),
    *("limit_all_gathers", "use_orig_params", "ignored_states", "device_mesh"),
)
DDP_PARAMETERS = (
    *(
        "module",
        "device_ids",
        "output_device",
        "dim",
        "broadcast_buffers",
        "init_sync",
        "process_group",
    ),
    *(
        "bucket_cap_mb",
        "find_unused_parameters",
        "check_reduction",
        "gradient_as_bucket_view",
        "static_graph",
    ),
    *(
        "delay_all_reduce_named_params",
        "param_to_hook_all_reduce",
        "mixed_precision",
        "device_mesh",
    ),
)
_STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2", "NO_SHARD")
_SILENT = (  # removed with the constructor
    *("module", "device_ids", "output_device", "dim"),
    *("check_reduction", "delay_all_reduce_named_params", "param_to_hook_all_reduce"),
)
_OF_A_MODULE = (
    *(
        "forward",
        "state_dict",
        "load_state_dict",
        "parameters",
        "named_parameters",
        "buffers",
        "named_buffers",
    ),
    *(
        "modules",
        "named_modules",
        "children",
        "named_children",
        "train",
        "eval",
        "to",
        "cuda",
        "cpu",
    ),
    *(
        "float",
        "double",
        "half",
        "bfloat16",
        "zero_grad",
        "requires_grad_",
        "apply",
        "get_submodule",
        "get_parameter",
    ),
    *("compile", "register_buffer"),
)
_CALLS: Table = {
    "enable_wrap, wrap": ("fsdp.enable_wrap", "fsdp.wrap"),
    ".module": (MODULE,),
    "fsdp_modules": ("fsdp.fsdp_modules",),
    "DataParallel": DATA_PARALLEL,
}


def calls(scene: Scene) -> Found:
    """What changes at every call."""
    return scene.called(_CALLS)


def wrappers(scene: Scene) -> Found:
    """The constructors, and each argument that they are given."""
    for event in scene.wraps:
        if event.op == FSDP1:
            arguments = dict(_given(event, FSDP1_PARAMETERS))
            whole = (
                "auto_wrap_policy" not in arguments
                and len(scene.wraps) == 1
                and not scene.flow.ops("fsdp.wrap")
            )
            yield (
                "FullyShardedDataParallel"
                + " without auto_wrap_policy" * (whole and not event.open),
                event,
                {},
            )
            for name, value in arguments.items():
                for one in choices(value):
                    for row, where, values in _fsdp1_argument(name, one, event):
                        yield (
                            row,
                            where,
                            {**values, **(_line(event, name) if where is event else {})},
                        )
        elif event.op in DDP:
            yield "DistributedDataParallel", event, {}
            for name, _ in _given(event, DDP_PARAMETERS):
                if name in DDP_PARAMETERS and name not in _SILENT:
                    yield f"DDP {name}", event, _line(event, name)


def _given(event: Event, parameters: tuple[str, ...]) -> Iterator[tuple[str, Value]]:
    """(name, value) of the arguments that are not None."""
    for name, value in (*zip(parameters, event.args, strict=False), *event.kwargs.items()):
        if not is_const(value, None):
            yield name, value


def _line(event: Event, name: str) -> dict[str, str]:
    """The line of a keyword argument."""
    keywords = event.node.keywords if isinstance(event.node, ast.Call) else []
    line = next((keyword.lineno for keyword in keywords if keyword.arg == name), event.line)
    return {"line": str(line)}


def _fsdp1_argument(name: str, value: Value, event: Event) -> Found:
    if name == "sharding_strategy":
        strategy = value.name.rpartition(".")[2]
        yield f"FSDP {name}" + (f"={strategy}" if strategy in _STRATEGIES else ""), event, {}
    elif name == "cpu_offload":
        made = made_by(value, "fsdp.CPUOffload")
        wanted = made.arg(0, "offload_params") if made is not None else None
        off = made is not None and (wanted is None or is_const(wanted, False))
        yield f"FSDP {name}" + ("=CPUOffload(False)" if off else ""), event, {}
    elif name == "auto_wrap_policy":
        yield _policy(value, event)
    elif name == "mixed_precision":
        yield from _precision(value, event)
    elif name in FSDP1_PARAMETERS[1:]:
        yield f"FSDP {name}", event, {}


def _policy(value: Value, event: Event) -> tuple[str, Event, dict[str, str]]:
    """An auto-wrap policy: by class if its classes are known."""
    made = made_by(value, "functools.partial", "fsdp.ModuleWrapPolicy")
    policy = (
        made.args[0] if made is not None and made.op == "functools.partial" and made.args else value
    )
    held = None
    if made is not None:
        held = made.kwargs.get("transformer_layer_cls") or (
            made.arg(0, "module_classes") if policy is value else None
        )
    names = (
        [shown(one) for one in held.parts]
        if held is not None and held.kind in ("list", "tuple")
        else []
    )
    if names:
        classes = names[0] if len(names) == 1 else f"({', '.join(names)})"
        return "FSDP auto_wrap_policy by class", event, {"classes": classes}
    by_size = policy.name.endswith("size_based_auto_wrap_policy")
    return "FSDP auto_wrap_policy" + (" by size" if by_size else ""), event, {}


def _precision(value: Value, event: Event) -> Found:
    """`MixedPrecision(...)` as a `MixedPrecisionPolicy`."""
    made = made_by(value, "fsdp.MixedPrecision")
    names = ("param_dtype", "reduce_dtype", "buffer_dtype", "keep_low_precision_grads")
    had = dict(_given(made, names)) if made is not None else {}
    param = (
        dtype(had["param_dtype"]) if "param_dtype" in had else "None" if made is not None else "..."
    )
    reduce = dtype(had["reduce_dtype"]) if "reduce_dtype" in had else "torch.float32"
    yield "FSDP mixed_precision", event, {"param": param, "reduce": reduce}
    for name in names[2:]:
        if name in had and made is not None:
            yield f"MixedPrecision {name}", made, {}


def dtype(value: Value) -> str:
    """A dtype as it is written."""
    return value.name if value.kind == "name" and value.name.startswith("torch.") else "..."


def shown(value: Value) -> str:
    """A class as it is written."""
    if value.kind in ("name", "class"):
        return value.name.rpartition(".")[2]
    return text(value.node) if value.node is not None else "..."


def device(scene: Scene) -> Found:
    """One process for each GPU, each on its own."""
    flow = scene.flow
    if scene.alone and not flow.ops("dist.init_process_group"):
        yield from rows("one process", scene.anchor)
    chosen = flow.ops(
        "torch.cuda.set_device", "torch.accelerator.set_device_index", "torch.xpu.set_device"
    )
    if scene.kind == "ddp" and flow.certain and not chosen:
        first = [
            event
            for event in scene.wraps[:1]
            if "device_ids" in event.kwargs or flow.methods("cuda")
        ]
        yield from rows("no torch.cuda.set_device", first)


def weights(scene: Scene) -> Found:
    """Where a model is sharded, and what DDP did about unequal weights and buffers."""
    flow = scene.flow
    if scene.alone and not scene.wraps:
        yield from rows("no sharding", scene.anchor)
    if scene.kind not in ("ddp", "single", "dataparallel"):
        return
    seeds = flow.ops("torch.manual_seed", "torch.random.manual_seed", "torch.cuda.manual_seed_all")
    early = [event for event in seeds if any(event.index < one.index for one in scene.anchor)]
    if scene.kind == "ddp":
        by_rank = (event for event in early if event.args and event.args[0].rank)
        yield from rows("a seed by rank before the model", by_rank)
        yield from rows(
            "BatchNorm", flow.matching(lambda name: name.startswith("torch.nn.BatchNorm"))
        )
    if flow.certain and not early:
        yield from rows("no seed before the model", scene.anchor)


def uses(scene: Scene) -> Found:
    """What is done to the wrapper, or to the model in it."""
    flow = scene.flow

    def of_model(*names: str) -> Iterator[Event]:
        return (event for event in flow.ops(*names) if event.args and scene.model(event.args[0]))

    compiled = (event for event in flow.methods("compile") if scene.model(event.on))
    yield from rows("torch.compile of the model", (*of_model("torch.compile"), *compiled))
    yield from rows(
        "a copy of the model", of_model("copy.deepcopy", "torch.optim.swa_utils.AveragedModel")
    )
    checkpointed = flow.ops("ac.apply_activation_checkpointing", "ac.checkpoint_wrapper")
    late = (
        event for event in checkpointed if any(wrap.index < event.index for wrap in scene.wraps)
    )
    yield from rows("activation checkpointing after the wrapper", late)
    asked = (event for event in flow.ops("builtins.isinstance") if len(event.args) == 2)
    about = (e for e in asked if any(part.name in (FSDP1, *DDP) for part in reach(e.args[1])))
    yield from rows("isinstance of the wrapper", about)
    for event in flow.methods("register_comm_hook"):
        if scene.wrapper(event.on):
            parts = [part.name for value in event.given() for part in reach(value)]
            low = any("bf16" in name or "fp16" in name for name in parts)
            yield "register_comm_hook" + (", a cast" if low else ""), event, {}


def methods(scene: Scene) -> Found:
    """Methods of the model other than forward, called past the wrapper: FSDP2 must be set to gather
    their parameters.
    """
    for event in scene.flow.events:
        called = event.op == "" and isinstance(event.node, ast.Call)
        if called and scene.inside(event.on) and event.method not in _OF_A_MODULE:
            yield "a method through .module", event, {"method": event.method}


def optimizers(scene: Scene) -> Found:
    """Optimizers that are built before the wrapper, or that shard their own state."""
    for event, models in scene.flow.optimizers:
        later = [
            model
            for wrap in scene.wraps
            if event.index < wrap.index and (model := wrap.arg(0, "module"))
        ]
        if any(model in choices(given) for model in models for given in later):
            yield "optimizer before the wrapper", event, {}
    for event in scene.flow.matching(lambda name: name.endswith(".ZeroRedundancyOptimizer")):
        inner = event.arg(1, "optimizer_class")
        plain = inner.name if inner is not None and inner.name else "optimizer_class"
        yield "ZeroRedundancyOptimizer", event, {"plain": plain}


FINDERS = (calls, device, wrappers, weights, uses, methods, optimizers)
