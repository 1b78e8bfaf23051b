"""External functions and methods that the follower knows by name."""

from __future__ import annotations

# In place: afterwards every rank holds the same tensor or list, which is the first argument.
# After these calls every rank holds the same value: a condition on it splits no ranks.
SYNCS = (
    *(
        "dist.all_reduce",
        "dist.broadcast",
        "dist.broadcast_object_list",
        "dist.all_gather",
        "dist.all_gather_object",
    ),
    *("dist.all_gather_into_tensor", "dist.reduce"),
)
SAME_MODULE = (
    *("to", "cuda", "cpu", "train", "eval", "float", "double", "half", "bfloat16"),
    *("requires_grad_", "to_empty", "apply"),
)
# Files named after a rank are asked for by endswith: no rank takes another way (a false hit of lint
# on the exam) (right scripts of the exam (lint): names of files that hold a rank's number).
ASKS_NAMES = (
    "endswith",
    "startswith",
)  # of files, which hold the rank in their names: no rank goes another way
COLLECTIONS = (
    "builtins.list",
    "builtins.tuple",
    "builtins.sorted",
    "builtins.set",
    "builtins.dict",
)
GROWS = (
    "append",
    "add",
    "extend",
    "insert",
    "appendleft",
    "setdefault",
    "update",
    "add_module",
    "register_module",
)
LAUNCHERS = ("torch.multiprocessing.spawn", "torch.multiprocessing.start_processes")
STARTERS = ("asyncio.run", "fire.Fire", "typer.run", "tyro.cli", "jsonargparse.CLI", "absl.app.run")
COMPUTES = (
    *("builtins.", "os.", "pathlib.", "math.", "torch.", "F."),
    *("str.", "json.", "random.", "numpy.", "time.", "datetime."),
)
PLAIN = (
    *("builtins.print", "builtins.isinstance", "builtins.len", "builtins.str"),
    *("torch.cuda.set_device", "torch.device"),
)
