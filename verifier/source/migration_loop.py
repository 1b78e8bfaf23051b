"""What a migration changes about the loop: steps, gradients, precision, data, checkpoints, and
loops that a library owns.
"""

from __future__ import annotations

from .events import CALL, STORE
from .flow_queries import is_const
from .migration_scene import Found, Scene, Table, rows
from .values import Value, choices, reach

_STATE_ROWS: Table = {
    "state_dict_type": ("state_dict_type", "set_state_dict_type"),
    "FullStateDictConfig": ("FullStateDictConfig", "FullOptimStateDictConfig"),
    "ShardedStateDictConfig": ("ShardedStateDictConfig", "ShardedOptimStateDictConfig"),
    "LocalStateDictConfig": ("LocalStateDictConfig", "LocalOptimStateDictConfig"),
    "optim_state_dict": ("optim_state_dict", "full_optim_state_dict", "sharded_optim_state_dict"),
    "optim_state_dict_to_load": (
        *(
            "optim_state_dict_to_load",
            "shard_full_optim_state_dict",
            "scatter_full_optim_state_dict",
        ),
        *("flatten_sharded_optim_state_dict", "rekey_optim_state_dict"),
    ),
    "summon_full_params": ("summon_full_params",),
}
_STATES = {name: row for row, names in _STATE_ROWS.items() for name in names}
_CALLS: Table = {
    "ShardedGradScaler": ("fsdp.ShardedGradScaler",),
    "GradScaler": ("torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler"),
    "autocast": ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast"),
    "torch.load": ("torch.load",),
    "dcp.save_state_dict": ("dcp.save_state_dict",),
    "dcp.load_state_dict": ("dcp.load_state_dict",),
}


def calls(scene: Scene) -> Found:
    """Scalers, autocast, and functions that read or write checkpoints: every call of them
    changes.
    """
    return scene.called(_CALLS)


def gradients(scene: Scene) -> Found:
    """Accumulation, clipping, and norms that are used as numbers."""
    flow = scene.flow
    yield from rows("with no_sync()", flow.methods("no_sync"))
    name = "require_backward_grad_sync"
    yield from rows(name, (event for event in flow.ops(STORE) if event.method == name))
    for event in flow.methods("clip_grad_norm_"):
        unknown = event.on is not None and event.on.kind in ("free", "attr")
        if scene.wrapper(event.on) or (scene.kind == "fsdp1" and unknown):
            yield "clip_grad_norm_ of the wrapper", event, {}
    used = (event for event in flow.ops("torch.nn.utils.clip_grad_norm_") if not event.discarded)
    yield from rows("the norm that clip_grad_norm_ returns", used)
    for event in flow.methods("norm"):
        if event.on is not None and any(
            part.kind == "attr" and part.name == "grad" for part in reach(event.on)
        ):
            yield "a manual norm of gradients", event, {}


def loss(scene: Scene) -> Found:
    """The scale of the loss."""
    for event in scene.flow.methods("backward"):
        if event.on is not None and any(
            part.name == "Div" and _by_world(part) for part in reach(event.on)
        ):
            yield "a loss divided by the world size", event, {}
        elif scene.alone and event.on is not None and event.on.kind != "free":
            yield "loss.backward()", event, {}


def _by_world(division: Value) -> bool:
    """Whether something is divided by the world size itself, or by a product with it."""
    if division.kind != "derived" or len(division.parts) != 2:
        return False
    queue = [division.parts[1]]
    while queue:
        one = queue.pop()
        variable = one.name == "os.environ" and is_const(one.parts[0], "WORLD_SIZE")
        if variable or one.name in ("dist.get_world_size", "world_size"):
            return True
        if one.name in ("Mult", "builtins.int", "builtins.float"):
            queue += one.parts
    return False


def ranks(scene: Scene) -> Found:
    """A forward on some ranks only, and inference mode: FSDP2 allows neither."""
    for event in scene.flow.events:
        forward = event.op == CALL or (event.op == "" and event.method in ("forward", "generate"))
        if forward and scene.model(event.on) and event.on_some_ranks is not None:
            yield "a forward on some ranks", event, {}
    if scene.models:
        yield from rows("inference_mode", scene.flow.ops("torch.inference_mode"))


def data(scene: Scene) -> Found:
    """The part of the data that a rank reads."""
    flow = scene.flow
    joins = flow.matching(
        lambda name: name.startswith("dist.algorithms.") and name.endswith(".Join")
    )
    yield from rows(
        "Join", (*joins, *(event for event in flow.methods("join") if scene.wrapper(event.on)))
    )
    if not scene.alone:
        return
    if not flow.ops("data.DataLoader"):
        fed = [event for event in flow.ops(CALL) if scene.model(event.on) and event.loops]
        yield from rows("batches of one process", fed[:1])
    for event in flow.ops("data.DataLoader"):
        if (
            not event.open
            and not {"sampler", "batch_sampler"} & set(event.kwargs)
            and len(event.args) < 4
        ):
            yield "DataLoader without a sampler", event, {}


def states(scene: Scene) -> Found:
    """State dicts, and the files that hold them."""
    flow = scene.flow
    for method, row in (
        ("state_dict", "state_dict()"),
        ("load_state_dict", "load_state_dict(...)"),
    ):
        for event in flow.methods(method):
            if scene.model(event.on):
                yield f"model.{row}", event, {}
            elif scene.optimizer(event.on):
                yield f"optimizer.{row}", event, {}
    for event in flow.ops("torch.save"):
        held = scene.held(event.args[0]) if event.args else set()
        if held:
            yield "torch.save" + (" of the model alone" if held == {"model"} else ""), event, {}
    for name, row in _STATES.items() if scene.kind == "fsdp1" else ():
        methods = (event for event in flow.methods(name) if scene.wrapper(event.on))
        yield from rows(row, (*flow.ops(f"fsdp.{name}"), *methods))


def libraries(scene: Scene) -> Found:
    """Loops that a library owns."""
    for event in scene.flow.events:
        name, given = event.op.rpartition(".")[2], event.kwargs
        match scene.kind:
            case "accelerate" if name == "FullyShardedDataParallelPlugin":
                changes = not is_const(given.get("fsdp_version"), 2)
            case "accelerate" if name == "Accelerator":
                changes = "fsdp_plugin" not in given
            case "transformers" if name.endswith("TrainingArguments"):
                name, changes = "TrainingArguments", not _version_2(given.get("fsdp_config"))
            case "lightning" if name in ("Trainer", "Fabric"):
                strategies = choices(given["strategy"]) if "strategy" in given else []
                changes = not any(one.name.endswith("ModelParallelStrategy") for one in strategies)
                name = "Lightning's strategy"
            case "deepspeed" if name == "initialize":
                name, changes = "deepspeed.initialize", True
            case _:
                changes = False
        if changes:
            yield name, event, {}


def _version_2(config: Value | None) -> bool:
    """Whether a config of the Trainer asks for FSDP2."""
    known = (
        (config.attrs.get(key) for key in ("[version]", "[fsdp_version]"))
        if config is not None
        else ()
    )
    return any(is_const(one, 2) for one in known)


FINDERS = (calls, gradients, loss, ranks, data, states, libraries)
