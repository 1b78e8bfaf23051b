"""What one process of a graded script runs: the script itself, unmodified, and hooks of torch that
write down what it holds.

Nothing here calls a collective: each rank writes its own pieces, and record.py puts them together
afterwards.
"""

from __future__ import annotations

import functools
import gc
import json
import os
import runpy
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as fsdp
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

WRAPPERS = {"module", "_orig_mod", "_checkpoint_wrapped_module", "_fsdp_wrapped_module"}
GATHERS = ("all_gather_single", "all_gather_into_tensor")
REDUCES = ("reduce_scatter_single", "reduce_scatter_tensor")
WEIGHTS = {".pt", ".pth", ".bin", ".safetensors"}
ULP = 2.0**-23


def clean(name: str) -> str:
    """A parameter's name without the parts that wrappers put in."""
    return ".".join(part for part in name.split(".") if part not in WRAPPERS)


def piece(tensor: torch.Tensor) -> dict[str, Any]:
    """This rank's part of a tensor, and where it belongs."""
    reported: dict[str, Any] = {
        "shape": list(tensor.shape),
        "placements": [],
        "mesh": [],
        "coordinate": [],
        "ranks": [],
    }
    local = tensor.detach()
    if isinstance(local, DTensor):
        mesh = local.device_mesh
        reported["placements"] = [[getattr(p, "dim", str(p))] for p in local.placements]
        reported["mesh"], reported["coordinate"] = (
            list(mesh.mesh.shape),
            list(mesh.get_coordinate() or []),
        )
        local = local.to_local()
    reported["sharded"] = bool(reported["mesh"])
    reported["stored"] = local.untyped_storage().nbytes() // max(local.element_size(), 1)
    reported["trainable"] = bool(tensor.requires_grad)
    reported["local"] = local.clone()
    return reported


@dataclass(frozen=True)
class Disturb:
    """What a launch does to the script: weights off by rounding, a kill at the n-th complete
    checkpoint, a slow disk.
    """

    perturb: int = 0
    die_at: int = 0
    slow_save: float = 0.0


class Recorder:
    """Writes what the script holds before its first and after each of its optimizer steps."""

    def __init__(self, rank: int, folder: Path, disturb: Disturb) -> None:
        self.rank, self.folder, self.disturb = rank, folder, disturb
        self.roots: list[nn.Module] = []
        self.inside = threading.local()
        self.first: dict[str, torch.Tensor] = {}
        self.made: dict[int, int] = {}
        self.grads_of, self.grads = 0, dict[str, Any]()
        self.reported: dict[str, Any] = {
            "steps": 0,
            "gathers": [],
            "reduces": [],
            "completed": [],
            "held": {},
            "state": {},
        }
        self.reported["fed"] = {}
        self.reported["opened"] = []
        self.reported["sharded_on"] = []

    def install(self) -> None:
        register_module_forward_pre_hook(self.enter)
        register_module_forward_hook(self.leave, always_call=True)
        register_optimizer_step_pre_hook(self.before)
        register_optimizer_step_post_hook(self.after)
        for names, list_name in ((GATHERS, "gathers"), (REDUCES, "reduces")):
            for name in names:
                if hasattr(dist, name):
                    setattr(dist, name, self.counted(getattr(dist, name), list_name))
        for name in ("torch.distributed.fsdp", "torch.distributed._composable.fsdp"):
            if hasattr(sys.modules.get(name), "fully_shard"):
                vars(sys.modules[name])["fully_shard"] = self.watched(fsdp.fully_shard)
        sys.addaudithook(self.audit)

    def audit(self, event: str, args: tuple[Any, ...]) -> None:
        """Files with tensors that are opened to be read, and distributed checkpoints that are about
        to be complete.
        """
        if event == "os.rename" and str(args[1]).endswith(".metadata"):
            self.completing(Path(str(args[1])).parent.name)
        if event == "open" and isinstance(args[0], str | os.PathLike):
            path = Path(args[0])
            to_read = not set(str(args[1] or "r")) & set("wax+")
            if path.suffix in WEIGHTS and to_read and path.name not in self.reported["opened"]:
                self.reported["opened"].append(path.name)

    def completing(self, folder: str) -> None:
        """On the rank that writes the metadata: be a slow disk, or be killed, if the task says
        so.
        """
        if len(self.reported["completed"]) + 1 == self.disturb.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(self.disturb.slow_save)
        self.reported["completed"].append([folder, self.reported["steps"]])

    def watched(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """fully_shard, reported of with the devices of the parameters that it is about to shard."""

        @functools.wraps(function)
        def call(module: Any, *args: Any, **kwargs: Any) -> Any:
            modules = module if isinstance(module, list | tuple) else [module]
            params = [p for m in modules for p in m.parameters() if not isinstance(p, DTensor)]
            self.reported["sharded_on"] = sorted(
                {*self.reported["sharded_on"], *(p.device.type for p in params)}
            )
            return function(module, *args, **kwargs)

        return call

    def counted(self, function: Callable[..., Any], where: str) -> Callable[..., Any]:
        """The collective, reported of with the larger of its two tensors."""

        def call(*args: Any, **kwargs: Any) -> Any:
            tensors = [t for t in (*args, *kwargs.values()) if isinstance(t, torch.Tensor)]
            if tensors and not getattr(self.inside, "collective", False):
                large = max(tensors, key=torch.Tensor.numel)
                self.reported[where].append(
                    [self.reported["steps"], large.numel(), str(large.dtype)]
                )
            outer, self.inside.collective = getattr(self.inside, "collective", False), True
            try:
                return function(*args, **kwargs)
            finally:
                self.inside.collective = outer

        return call

    def enter(self, module: nn.Module, args: Any) -> None:
        depth = getattr(self.inside, "forward", 0)
        self.inside.forward = depth + 1
        if depth == 0 and next(module.parameters(), None) is not None:
            self.found(module)
            self.inside.fed = not (
                torch.is_grad_enabled() and any(module is root for root in self.roots)
            )
        elif depth and not self.inside.fed and args and self.is_leaf(module, args[0]):
            # the first layer of a model that is trained: its input shows how much this rank has to
            # do
            self.inside.fed = True
            step = str(self.reported["steps"])
            self.reported["fed"][step] = self.reported["fed"].get(step, 0) + args[0].numel()

    @staticmethod
    def is_leaf(module: nn.Module, given: Any) -> bool:
        return isinstance(given, torch.Tensor) and not any(module.children())

    def leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self.inside.forward = max(getattr(self.inside, "forward", 1) - 1, 0)

    def found(self, module: nn.Module) -> None:
        """A module that was called from outside of any other; the outermost ones are the models."""
        if any(module is inner for root in self.roots for inner in root.modules()):
            return
        inner = set(module.modules())
        self.roots = [root for root in self.roots if root not in inner] + [module]
        self.first = {}
        self.first = self.named("parameters")
        if self.disturb.perturb:
            generator = torch.Generator().manual_seed(self.disturb.perturb)
            with torch.no_grad():
                for parameter in module.parameters():
                    sign = torch.randint(0, 2, parameter.shape, generator=generator) * 2 - 1
                    parameter.mul_(1 + ULP * sign)

    def named(self, kind: str) -> dict[str, torch.Tensor]:
        """Parameters or buffers of the models; of several models, the number of each comes first.

        While a group is gathered, its whole tensors are registered instead of the shards, which the
        optimizer changes: the shards are those from before the first forward.
        """
        result = {}
        for number, root in enumerate(self.roots):
            front = "" if len(self.roots) == 1 else str(number) + "/"
            for name, tensor in getattr(root, "named_" + kind)(remove_duplicate=False):
                before = self.first.get(front + clean(name)) if kind == "parameters" else None
                gathered = isinstance(before, DTensor) and not isinstance(tensor, DTensor)
                result[front + clean(name)] = before if gathered and before is not None else tensor
        return result

    @staticmethod
    def idle(optimizer: torch.optim.Optimizer) -> bool:
        """A step without a rate and without gradients is how state-dict helpers create the state:
        no training.
        """
        params = [p for group in optimizer.param_groups for p in group["params"]]
        grads = [
            p.grad.to_local() if isinstance(p.grad, DTensor) else p.grad
            for p in params
            if p.grad is not None
        ]
        no_rate = all(float(group.get("lr", 1)) == 0 for group in optimizer.param_groups)
        return no_rate and not any(bool(g.any()) for g in grads)

    def before(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if self.idle(optimizer):
            self.made[id(optimizer)] = self.made.get(id(optimizer), 0) - 1
            return
        step = self.made.get(id(optimizer), 0) + 1
        if "tied" not in self.reported:  # the first step of the first optimizer
            self.store("weights", 0)
            tied: dict[int, list[str]] = {}
            for name, parameter in self.named("parameters").items():
                tied.setdefault(id(parameter), []).append(name)
            self.reported["tied"] = sorted(
                sorted(names) for names in tied.values() if len(names) > 1
            )
        grads = {
            name: piece(p.grad)
            for name, p in self.named("parameters").items()
            if p.grad is not None
        }
        if step == self.grads_of:  # another optimizer's share of the same step
            grads = {**self.grads, **grads}
        self.grads_of, self.grads = step, grads
        torch.save(grads, self.folder / f"grads{step}.{self.rank}.pt")

    def after(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        step = self.made[id(optimizer)] = self.made.get(id(optimizer), 0) + 1
        if step <= 0:
            return
        self.reported["steps"] = step
        self.store("weights", step)
        if step == 2:
            self.reported["held"] = self.held()
            states = [
                v
                for s in optimizer.state.values()
                for v in s.values()
                if isinstance(v, torch.Tensor)
            ]
            local = [v.to_local() if isinstance(v, DTensor) else v for v in states]
            self.reported["state"] = {
                "whole": sum(v.numel() for v in states),
                "here": sum(v.numel() for v in local),
            }
        self.write()

    def store(self, what: str, step: int) -> None:
        kept = {name: piece(p) for name, p in self.named("parameters").items()}
        buffers = {name: piece(b) for name, b in self.named("buffers").items()}
        torch.save(
            {"parameters": kept, "buffers": buffers}, self.folder / f"{what}{step}.{self.rank}.pt"
        )

    def held(self) -> dict[str, int]:
        """Elements of whole, plain tensors in the shape of a parameter that are alive now, and of
        all parameters.
        """
        shapes = {tuple(p.shape) for p in self.named("parameters").values()}
        unique = {id(p): p.numel() for p in self.named("parameters").values()}
        tensors = [o for o in gc.get_objects() if issubclass(type(o), torch.Tensor)]
        shards = {
            t.to_local().untyped_storage().data_ptr() for t in tensors if isinstance(t, DTensor)
        }
        whole: dict[int, int] = {}
        for tensor in tensors:
            if (
                isinstance(tensor, DTensor)
                or not tensor.is_floating_point()
                or tensor.device.type == "meta"
            ):
                continue
            storage = tensor.untyped_storage()
            if (
                storage.nbytes() < tensor.numel() * tensor.element_size()
                or storage.data_ptr() in shards
            ):
                continue
            if tuple(tensor.shape) in shapes:
                whole[storage.data_ptr()] = tensor.numel()
        return {"whole": sum(whole.values()), "all": sum(unique.values())}

    def write(self) -> None:
        (self.folder / f"reported.{self.rank}.json").write_text(
            json.dumps(self.reported), encoding="utf-8"
        )


def forget_the_grader() -> None:
    """A graded folder may have modules of the same names as the grader's own."""
    here = Path(__file__).resolve().parents[1]
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if file and Path(file).resolve().is_relative_to(here) and name != "__main__":
            del sys.modules[name]
    sys.path[:] = [p for p in sys.path if Path(p or ".").resolve() != here]


def run(script: Path, rank: int, argv: list[str], folder: Path, disturb: Disturb) -> int:
    """Run the script in this process and return its exit code."""
    forget_the_grader()
    gc.freeze()  # what the parent holds is not the script's
    recorder = Recorder(rank, folder, disturb)
    recorder.install()
    sys.argv = [str(script), *argv]
    sys.path.insert(0, str(script.parent))
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = error.code if isinstance(error.code, int) else int(error.code is not None)
        if isinstance(error.code, str):
            print("SystemExit:", error.code, file=sys.stderr)
    except BaseException:
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]  # what the interpreter does at its end: threads that still save may finish
    recorder.write()
    sys.stdout.flush()
    sys.stderr.flush()
    return code
