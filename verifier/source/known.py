"""Functions and methods of others that the follower knows by name."""

from __future__ import annotations

# In place: afterwards every rank holds the same. Position of the tensor or list that changes.
SYNCS = {
    "dist.all_reduce": 0,
    "dist.broadcast": 0,
    "dist.broadcast_object_list": 0,
    "dist.all_gather": 0,
    "dist.all_gather_object": 0,
    "dist.all_gather_into_tensor": 0,
    "dist.reduce": 0,
}
SAME_MODULE = (
    "to",
    "cuda",
    "cpu",
    "train",
    "eval",
    "float",
    "double",
    "half",
    "bfloat16",
    "requires_grad_",
    "to_empty",
    "apply",
)
GROWS = ("append", "add", "extend", "insert", "appendleft", "setdefault", "update", "add_module", "register_module")
LAUNCHERS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
STARTERS = ("asyncio.run", "fire.Fire", "typer.run", "tyro.cli", "jsonargparse.CLI", "absl.app.run")
COMPUTES = (
    "builtins.",
    "os.",
    "pathlib.",
    "math.",
    "torch.",
    "F.",
    "str.",
    "json.",
    "random.",
    "numpy.",
    "time.",
    "datetime.",
)
PLAIN = (
    "builtins.print",
    "builtins.isinstance",
    "builtins.len",
    "torch.cuda.set_device",
    "torch.device",
    "builtins.str",
)
