"""Each case measured without the guard, with what only its author knows: is it what it says?

    torchrun --nproc-per-node 8 prove.py --law samples --out FOLDER [--only NAME]
    torchrun --nproc-per-node 4 prove.py --law samples --out FOLDER     # launches on 4 ranks

Everything happens ten times earlier than in run.py, all cases in one process group. A line a case:
the first step at which each measure was broken, and its value.
"""

from __future__ import annotations

import argparse
import hashlib
import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cases import Case, Facts, all_cases, trainer_of
from model import Batch
from options import parse
from torch import Tensor
from torch.distributed.tensor import DTensor
from trainer import Trainer

EPOCH_STEPS = {130: 14, 517: 53, 388: 40}  # epochs have 13 steps here, 129 in run.py


def scaled(step: int) -> int:
    return EPOCH_STEPS.get(step, step // 10)


def local(tensor: Tensor) -> Tensor:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def whole(tensor: Tensor) -> Tensor:
    return (tensor.full_tensor() if isinstance(tensor, DTensor) else tensor).detach().clone()


def digest(tensor: Tensor) -> str:
    return hashlib.sha1(local(tensor).float().numpy().tobytes()).hexdigest()[:8]


def gathered(value: Any) -> list[Any]:
    found: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(found, value)
    return found


class Witness(Trainer):
    """Below the case: sees what it hands on to the right trainer."""

    found: dict[str, Any]

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        self.seen.append((x.float(), loss.item()))
        return loss

    def log(self, loss: float, norm: float) -> None:
        if not self.seen:
            return
        true = sum(gathered(sum(v for _, v in self.seen) / len(self.seen))) / self.world
        if abs(loss / true - 1) > 1e-3:
            self.note("logged loss / mean that is trained on", round(loss / true, 4))
        norms = gathered(norm)
        if max(norms) > min(norms) * 1.0001:
            self.note("norms of ranks", [round(n, 3) for n in norms[:3]])

    def note(self, what: str, value: Any) -> None:
        self.found.setdefault(what, {"step": self.step, "is": value})

    seen: list[tuple[Tensor, float]]


class Outer(Case):
    """Above the case: what it does as a whole, after each step."""

    found: dict[str, Any]
    seen: list[tuple[Tensor, float]]

    def __init__(self, args: argparse.Namespace) -> None:
        self.found, self.seen = {}, []
        self.norms: dict[int, float] = {}
        super().__init__(args)
        self.rows = {tuple(row[:4].tolist()): i for i, row in enumerate(self.data.x)}
        self.past: set[int] = set(args.past.get(str(self.epoch), ())) if args.resume else set()
        self.orders: dict[str, list[int]] = dict(args.past)
        self.previous = {n: local(p).clone() for n, p in self.core.named_parameters()}
        if args.resume:
            self.compare(torch.load(args.out / f"snapshot_{self.saved()}.pt"))

    def saved(self) -> int:
        newest = max(path.name for path in self.args.out.glob("step_*"))
        return int(newest.removeprefix("step_"))

    def clip(self) -> Tensor:
        norm = super().clip()
        self.norms[self.step + 1] = float(norm)
        self.rates = self.optimizer.param_groups[0]["lr"], self.scheduler.get_last_lr()[0]
        return norm

    def train_step(self, window: list[Batch]) -> None:
        self.seen.clear()
        super().train_step(window)

    def note(self, what: str, value: Any) -> None:
        self.found.setdefault(what, {"step": self.step, "is": value})

    def after_step(self) -> None:
        self.samples()
        if self.step >= self.begin - 1:
            self.replicas()
            self.training()
        self.previous = {n: local(p).clone() for n, p in self.core.named_parameters()}
        if self.args.save_every and self.step % self.args.save_every == 0:
            snapshot = self.snapshot()
            if self.rank == 0:
                self.args.out.mkdir(parents=True, exist_ok=True)
                torch.save(snapshot, self.args.out / f"snapshot_{self.step}.pt")
            self.args.kept = {k: list(v) for k, v in self.orders.items()}
        super().after_step()

    def samples(self) -> None:
        rows = [row for x, _ in self.seen for row in x]
        ids = [self.rows.get(tuple(row[:4].tolist()), -1) for row in rows]
        step = [i for part in gathered(ids) for i in part if i >= 0]
        if len(step) > len(set(step)):
            self.note("samples twice in one step", len(step) - len(set(step)))
        order = self.orders.setdefault(str(self.epoch), [])
        again = len(set(step) & set(order))
        if again:
            self.note("samples again within the epoch", again)
        order += step
        first = self.orders.get(str(self.epoch - 1), [])
        if self.epoch and len(order) >= 64 and first[:64] == order[:64]:
            self.note("order of the epoch before again", True)

    def replicas(self) -> None:
        mine: dict[str, str | float] = {}
        for name, p in self.core.named_parameters():
            if self.args.mesh == "fsdp" and isinstance(p, DTensor):
                continue
            mine[name] = digest(p)
            for key, value in self.optimizer.state.get(p, {}).items():
                mine[f"{name}.{key}"] = digest(value) if value.numel() else ""
        mine |= {name: digest(b) for name, b in self.core.named_buffers()}
        mine["lr"] = self.optimizer.param_groups[0]["lr"]
        ranks = gathered(mine)
        half = self.world // 2
        for r, other in enumerate(ranks):
            like = ranks[r % half] if self.args.mesh == "hsdp" else ranks[0]
            apart = [n for n, value in other.items() if value != like.get(n)]
            if apart:
                self.note("replicas differ", [r, *apart[:2], len(apart)])
                self.found["replicas differ"]["until"] = self.step

    def training(self) -> None:
        if abs(self.rates[0] - self.rates[1]) > 1e-12:
            self.note("rate in use, of schedule", list(self.rates))
        moved = {}
        for name, p in self.core.named_parameters():
            before = self.previous.get(name)
            if before is not None and p.requires_grad and before.numel():
                change = (local(p) - before).abs().max().item()
                moved[name] = change / max(self.scheduler.get_last_lr()[0], 1e-12)
                if change != change:
                    self.note("not finite", name)
        ranks = gathered(moved)
        names = sorted({n for r in ranks for n in r})
        still = [n for n in names if max(r.get(n, 0) for r in ranks) == 0]
        if still:
            self.note("not moved", [*still[:2], len(still)])
        largest = max((max(r.values(), default=0), i) for i, r in enumerate(ranks))
        if largest[0] > 12:
            self.note("update / rate", [round(largest[0], 1), f"rank {largest[1]}"])
        held = {id(p) for g in self.optimizer.param_groups for p in g["params"]}
        lost = [n for n, p in self.core.named_parameters() if id(p) not in held]
        if lost:
            self.note("in no optimizer", [*lost[:2], len(lost)])

    def snapshot(self) -> dict[str, Any]:
        state: dict[str, Any] = {"step": self.step, "epoch": self.epoch, "batch": self.batch}
        state |= {k: v for k, v in self.optimizer.param_groups[0].items() if k != "params"}
        state["lr"] = self.scheduler.get_last_lr()[0]
        for name, p in self.core.named_parameters():
            state[f"trainable {name}"] = p.requires_grad
            state[name] = whole(p)
            for key, value in self.optimizer.state.get(p, {}).items():
                if isinstance(value, DTensor) or (key != "step" and self.args.mesh == "ddp"):
                    state[f"{name}.{key}"] = whole(value)
                elif value.dim():
                    state[f"{name}.{key}"] = gathered(value)
        state |= {name: b.clone() for name, b in self.core.named_buffers()}
        if hasattr(self, "ema"):
            state |= {f"ema {n}": whole(p) for n, p in self.ema.named_parameters()}
        state["generators"] = gathered(torch.get_rng_state())
        return state

    def compare(self, saved: dict[str, Any]) -> None:
        now, other = self.snapshot(), []
        for name, value in saved.items():
            if name == "generators" and len(value) != self.world:
                continue
            if not same(value, now.get(name)):
                other.append(name)
        if other:
            self.note("other after the resume", [*other[:3], len(other)])


def same(a: Any, b: Any) -> bool:
    if isinstance(a, Tensor):
        return isinstance(b, Tensor) and torch.equal(a, b)
    if isinstance(a, list):
        return isinstance(b, list) and all(map(same, a, b))
    return bool(a == b)


def run_case(facts: Facts, out: Path, reference: dict[int, float]) -> dict[str, Any]:
    base = trainer_of(facts.name)
    kind: Any = type("Witnessed", (Outer, base, Witness), {"facts": facts})
    found: dict[str, Any] = {}
    norms: dict[int, float] = {}
    world, past = dist.get_world_size(), out / facts.name / "past.json"
    for number, launch in enumerate(facts.launches):
        if launch.world != world:
            continue
        args = arguments(facts, out / facts.name)
        args.stop_at = launch.until // 10 if len(facts.launches) > 1 else scaled(facts.begin) + 24
        if facts.law == "loss-and-norm":
            logs = "loss" in facts.name or "norm" in facts.name
            args.stop_at = args.stop_at // 50 * 50 + 50 if logs else scaled(facts.begin) + 4
        args.resume = number > 0
        args.past = json.loads(past.read_text()) if args.resume else {}
        args.kept = {}
        trainer = kind(args)
        trainer.fit()
        norms |= trainer.norms
        if dist.get_rank() == 0:
            past.parent.mkdir(parents=True, exist_ok=True)
            past.write_text(json.dumps(args.kept))
        dist.barrier()
        if facts.law == "hardware-repeats":
            repeats(trainer)
        found |= {k: v for k, v in trainer.found.items() if k not in found}
    for step, norm in norms.items():
        if step in reference and abs(norm / reference[step] - 1) > 1e-3:
            found["norm, of the right run"] = {"step": step, "is": [norm, reference[step]]}
            break
    return found


def repeats(trainer: Any) -> None:
    a, b, c = torch.randn(4, 32), torch.randn(32, 96), torch.randn(96)
    right, wrong = torch.addmm(c, a, b, out=torch.empty(4, 96)), 0
    product = torch.mm(a, b, out=torch.empty(4, 96))
    for _ in range(400):
        wrong += not torch.equal(torch.addmm(c, a, b), right)
        wrong += not torch.equal(torch.mm(a, b), product)
    counts = gathered(wrong)
    trainer.found["products of 400 that are wrong, by rank"] = {"step": 0, "is": counts}
    trainer.__dict__.pop("library", None)


def arguments(facts: Facts, out: Path) -> argparse.Namespace:
    args = parse(["--mesh", facts.mesh, "--samples", "400", "--out", str(out), *facts.flags])
    args.begin, args.steps = scaled(facts.begin), 100
    args.warmup, args.save_every = 5, min(args.save_every, 10)
    return args


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--law", default="")
    parser.add_argument("--kind", default="faults")
    parser.add_argument("--only", default="", help="parts of names, with commas between")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    references: dict[tuple[Any, ...], dict[int, float]] = {}
    for facts in all_cases(options.kind):
        due = any(launch.world == dist.get_world_size() for launch in facts.launches)
        named = any(part in facts.name for part in options.only.split(","))
        if options.law not in ("", facts.law) or not named or not due:
            continue
        if facts.law == "hang":  # run.py shows it: the run does not end
            continue
        key = (facts.mesh, *facts.flags)
        if facts.law == "loss-and-norm" and key not in references:
            references[key] = right_norms(facts, options.out)
        found = run_case(facts, options.out, references.get(key, {}))
        if dist.get_rank() == 0:
            print(f"{facts.name} ({scaled(facts.begin)}): {json.dumps(found)}", flush=True)
    dist.destroy_process_group()


def right_norms(facts: Facts, out: Path) -> dict[int, float]:
    args = arguments(facts, out / "right")
    args.stop_at, args.past, args.kept, args.save_every = 82, {}, {}, 0
    kind: Any = type("Right", (Outer, Case, Witness), {"facts": facts})
    trainer = kind(args)
    trainer.begin = 10**6
    trainer.fit()
    norms: dict[int, float] = trainer.norms
    return norms


if __name__ == "__main__":
    main()
