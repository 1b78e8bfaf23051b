"""What a migration changes about the loop: steps, gradients, precision, data, checkpoints, and loops that a library owns."""

from __future__ import annotations

from .events import CALL, STORE
from .looks import is_const
from .migration_scene import Found, Scene
from .values import Value, choices, reach

_STATES = {
    "state_dict_type": "state_dict_type",
    "set_state_dict_type": "state_dict_type",
    "FullStateDictConfig": "FullStateDictConfig",
    "FullOptimStateDictConfig": "FullStateDictConfig",
    "ShardedStateDictConfig": "ShardedStateDictConfig",
    "ShardedOptimStateDictConfig": "ShardedStateDictConfig",
    "LocalStateDictConfig": "LocalStateDictConfig",
    "LocalOptimStateDictConfig": "LocalStateDictConfig",
    "optim_state_dict": "optim_state_dict",
    "full_optim_state_dict": "optim_state_dict",
    "sharded_optim_state_dict": "optim_state_dict",
    "optim_state_dict_to_load": "optim_state_dict_to_load",
    "shard_full_optim_state_dict": "optim_state_dict_to_load",
    "scatter_full_optim_state_dict": "optim_state_dict_to_load",
    "flatten_sharded_optim_state_dict": "optim_state_dict_to_load",
    "rekey_optim_state_dict": "optim_state_dict_to_load",
    "summon_full_params": "summon_full_params",
}
_AUTOCAST = ("torch.autocast", "torch.amp.autocast", "torch.amp.autocast_mode.autocast")


def gradients(scene: Scene) -> Found:
    """Accumulation, clipping, and norms that are used as numbers."""
    flow = scene.flow
    for event in flow.methods("no_sync"):
        yield "with no_sync()", event, {}
    for event in flow.ops(STORE):
        if event.method == "require_backward_grad_sync":
            yield "require_backward_grad_sync", event, {}
    for event in flow.methods("clip_grad_norm_"):
        unknown = event.on is not None and event.on.kind in ("free", "attr")
        if scene.wrapper(event.on) or (scene.kind == "fsdp1" and unknown):
            yield "clip_grad_norm_ of the wrapper", event, {}
    for event in flow.ops("torch.nn.utils.clip_grad_norm_"):
        if not event.discarded:
            yield "the norm that clip_grad_norm_ returns", event, {}
    for event in flow.methods("norm"):
        if event.on is not None and any(part.kind == "attr" and part.name == "grad" for part in reach(event.on)):
            yield "a norm of gradients by hand", event, {}


def precision(scene: Scene) -> Found:
    """Scalers and autocast."""
    for event in scene.flow.ops("fsdp.ShardedGradScaler"):
        yield "ShardedGradScaler", event, {}
    for event in scene.flow.ops("torch.amp.GradScaler", "torch.GradScaler", "torch.amp.grad_scaler.GradScaler"):
        yield "GradScaler", event, {}
    for event in scene.flow.ops(*_AUTOCAST):
        yield "autocast", event, {}


def loss(scene: Scene) -> Found:
    """The scale of the loss."""
    for event in scene.flow.methods("backward"):
        if event.on is not None and any(part.name == "Div" and _by_world(part) for part in reach(event.on)):
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
        if one.name in ("dist.get_world_size", "world_size") or (
            one.name == "os.environ" and is_const(one.parts[0], "WORLD_SIZE")
        ):
            return True
        if one.name in ("Mult", "builtins.int", "builtins.float"):
            queue += one.parts
    return False


def ranks(scene: Scene) -> Found:
    """What only some ranks may do no more, and what evaluation may not."""
    for event in scene.flow.events:
        forward = event.op == CALL or (event.op == "" and event.method in ("forward", "generate"))
        if forward and scene.model(event.on) and event.on_some_ranks is not None:
            yield "a forward on some ranks", event, {}
    if scene.models:
        for event in scene.flow.ops("torch.inference_mode"):
            yield "inference_mode", event, {}


def data(scene: Scene) -> Found:
    """The part of the data that a rank reads."""
    flow = scene.flow
    joins = flow.matching(lambda name: name.startswith("dist.algorithms.") and name.endswith(".Join"))
    for event in (*joins, *(event for event in flow.methods("join") if scene.wrapper(event.on))):
        yield "Join", event, {}
    if not scene.alone:
        return
    if not flow.ops("data.DataLoader"):
        fed = [event for event in flow.ops(CALL) if scene.model(event.on) and event.loops]
        yield from (("batches of one process", event, {}) for event in fed[:1])
    for event in flow.ops("data.DataLoader"):
        if not event.open and not {"sampler", "batch_sampler"} & set(event.kwargs) and len(event.args) < 4:
            yield "DataLoader without a sampler", event, {}


def states(scene: Scene) -> Found:
    """State dicts, and the files that hold them."""
    flow = scene.flow
    for method, row in (("state_dict", "state_dict()"), ("load_state_dict", "load_state_dict(...)")):
        for event in flow.methods(method):
            if scene.model(event.on):
                yield f"model.{row}", event, {}
            elif scene.optimizer(event.on):
                yield f"optimizer.{row}", event, {}
    for event in flow.ops("torch.save"):
        held = scene.held(event.args[0]) if event.args else set()
        if held:
            yield "torch.save" + (" of the model alone" if held == {"model"} else ""), event, {}
    for event in flow.ops("torch.load"):
        yield "torch.load", event, {}
    for event in flow.ops("dcp.save_state_dict", "dcp.load_state_dict"):
        yield event.op, event, {}
    for name, row in _STATES.items() if scene.kind == "fsdp1" else ():
        methods = [event for event in flow.methods(name) if scene.wrapper(event.on)]
        for event in (*flow.ops(f"fsdp.{name}"), *methods):
            yield row, event, {}


def libraries(scene: Scene) -> Found:
    """Loops that a library owns."""
    for event in scene.flow.events:
        name = event.op.rpartition(".")[2]
        if scene.kind == "accelerate" and name == "FullyShardedDataParallelPlugin":
            if not is_const(event.kwargs.get("fsdp_version"), 2):
                yield name, event, {}
        elif scene.kind == "accelerate" and name == "Accelerator" and "fsdp_plugin" not in event.kwargs:
            yield name, event, {}
        elif (
            scene.kind == "transformers"
            and name.endswith("TrainingArguments")
            and not _version_2(event.kwargs.get("fsdp_config"))
        ):
            yield "TrainingArguments", event, {}
        elif scene.kind == "lightning" and name in ("Trainer", "Fabric"):
            given = event.kwargs.get("strategy")
            if given is None or not any(one.name.endswith("ModelParallelStrategy") for one in choices(given)):
                yield "Lightning's strategy", event, {}
        elif scene.kind == "deepspeed" and name == "initialize":
            yield "deepspeed.initialize", event, {}


def _version_2(config: Value | None) -> bool:
    """Whether a config of the Trainer asks for FSDP2."""
    known = (config.attrs.get(key) for key in ("[version]", "[fsdp_version]")) if config is not None else ()
    return any(is_const(one, 2) for one in known)


FINDERS = (gradients, precision, loss, ranks, data, states, libraries)
