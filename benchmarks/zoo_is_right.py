"""Are the right scripts right?

Shown without the verifier: none of its code runs here, only two public hooks of torch.

    python benchmarks/zoo_is_right.py --out build/zoo_is_right.json

Every script of tests/zoo runs on 1, 2 and 4 ranks, or on those of them that its mesh allows. After
each optimizer step the whole weights are gathered. A right script ends at the same weights at every
size: `apart` is |difference| / |total update| after STEPS steps, and where the script resumes, its
weights after each step are those of the run that went on. What cannot be compared so is listed with
the reason.
"""

from __future__ import annotations

import argparse
import os
import runpy
import signal
import socket
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint.state_dict
import torch.distributed.fsdp
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from corpus import Case, right
from machine import environment
from results_file import write

STEPS = 4
SECONDS = 120
# of the update: AdamW turns rounding into whole steps where a gradient is nearly zero
ALLOWED = 0.02
EXCEPTIONS = {
    "zoo/per_rank_batch": "its global batch grows with the ranks, on purpose",
    "zoo/checkpoint_dropout_rng": "dropout draws other masks at other sizes",
    "zoo/checkpointed_dropout": "dropout draws other masks at other sizes",
    "zoo/mixed_precision": "bfloat16 rounds differently for other local batches",
    "zoo/autocast": "bfloat16 rounds differently for other local batches",
}


def words(case: Case, key: str, folder: Path) -> list[str]:
    """One of the argument lists of a case, with a checkpoint folder put in."""
    return [
        word.replace("{checkpoint}", str(folder))
        for word in str(case.settings.get(key, "")).split()
    ]


def launch(
    script: Path, ranks: int, argv: list[str], dump: Path, patience: float = SECONDS
) -> bool:
    """Run the script on `ranks` processes; every rank 0 step leaves `dump/STEP.pt`.

    Returns whether all ended well.
    """
    dump.mkdir(parents=True)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    children = []
    for rank in range(ranks):
        if (pid := os.fork()) == 0:
            be_rank(script, rank, ranks, port, argv, dump)
        children.append(pid)
    until, good, waiting = time.monotonic() + patience, True, set(children)
    while waiting:
        for pid in list(waiting):
            done, status = os.waitpid(pid, os.WNOHANG)
            if done:
                waiting.discard(pid)
                good &= status == 0
        if time.monotonic() > until or not good:
            for pid in waiting:
                os.kill(pid, signal.SIGKILL)
                os.waitpid(pid, 0)
            return False
        time.sleep(0.02)
    return good


def be_rank(script: Path, rank: int, ranks: int, port: int, argv: list[str], dump: Path) -> None:
    """One rank; never returns."""
    os.setsid()
    log = os.open(dump / f"rank{rank}.log", os.O_WRONLY | os.O_CREAT)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), LOCAL_WORLD_SIZE=str(ranks)
    )
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    torch.set_num_threads(1)
    sys.argv = [str(script), *argv]
    sys.path[0] = str(script.parent)
    keep_weights(rank, dump)
    code = 1
    try:
        runpy.run_path(str(script), run_name="__main__")
        code = 0
    except SystemExit as error:
        code = int(error.code or 0)
    except BaseException:
        import traceback

        traceback.print_exc()
    sys.stdout.flush()
    os._exit(code)


def keep_weights(rank: int, dump: Path) -> None:
    """After each step of the first optimizer gather its weights; leave before step STEPS + 1."""
    made: dict[int, int] = {}

    def helper() -> bool:
        """torch's state-dict helpers step an optimizer once to create its state: that is no
        training.
        """
        frame = sys._getframe(2)
        while frame.f_back is not None and frame.f_code.co_name != "_init_optim_state":
            frame = frame.f_back
        return frame.f_code.co_name == "_init_optim_state"

    def before(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if helper():
            return
        made.setdefault(id(optimizer), 0)
        if id(optimizer) == next(iter(made)) and made[id(optimizer)] == 0:
            store(optimizer, 0)
        if id(optimizer) == next(iter(made)) and made[id(optimizer)] == STEPS:
            raise SystemExit(0)

    def after(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if helper():
            return
        made[id(optimizer)] += 1
        if id(optimizer) == next(iter(made)):
            store(optimizer, made[id(optimizer)])

    @torch.no_grad()
    def store(optimizer: torch.optim.Optimizer, step: int) -> None:
        whole = [
            p.full_tensor() if hasattr(p, "full_tensor") else p
            for g in optimizer.param_groups
            for p in g["params"]
        ]
        if rank == 0:
            torch.save(
                torch.cat([w.detach().double().flatten() for w in whole]), dump / f"{step}.pt"
            )
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.barrier()

    register_optimizer_step_pre_hook(before)
    register_optimizer_step_post_hook(after)


def weights(dump: Path, step: int) -> torch.Tensor:
    """The weights after a step (0: before the first)."""
    found: torch.Tensor = torch.load(dump / f"{step}.pt", weights_only=True)
    return found


def examine(case: Case, folder: Path) -> dict[str, Any]:
    """What the runs of one script have in common."""
    script = case.path
    sizes = [2, 4] if case.fixed_size else [1, 2, 4]
    kept = folder / "checkpoint"
    row: dict[str, Any] = {"case": case.name, "sizes": sizes}
    for size in sizes:
        place = kept if size == sizes[-1] else folder / f"scratch{size}"
        place.mkdir()
        extra = words(case, "save_args", place) if size == sizes[-1] else []
        if not launch(script, size, [*words(case, "args", place), *extra], folder / f"run{size}"):
            if case.fixed_size and size != sizes[-1]:
                return {**row, "sizes": [4], "apart": None, "why": "its mesh allows no other size"}
            log = "".join(path.read_text()[-400:] for path in (folder / f"run{size}").glob("*.log"))
            return {**row, "apart": None, "failed": f"did not run on {size} ranks: {log[-400:]}"}
    first = folder / f"run{sizes[0]}"
    update = (weights(first, STEPS) - weights(first, 0)).norm()
    others = [
        (weights(folder / f"run{size}", STEPS) - weights(first, STEPS)).norm() / update
        for size in sizes[1:]
    ]
    row["apart"] = max((float(value) for value in others), default=0.0)
    if case.name in EXCEPTIONS:
        row["why"] = EXCEPTIONS[case.name]
    if "resume_args" in case.settings:
        row["resumed"] = resumes(case, folder, kept, sizes[-1])
    return row


def resumes(case: Case, folder: Path, kept: Path, size: int) -> str:
    """Resume on the size that saved, and say from where the run went on, if it did."""
    argv = [*words(case, "args", kept), *words(case, "resume_args", kept)]
    if not launch(case.path, size, argv, folder / "resumed"):
        return "did not run"
    straight = [weights(folder / f"run{size}", step) for step in range(STEPS + 1)]
    begin = weights(folder / "resumed", 0)
    start = next((step for step in range(1, STEPS) if torch.equal(straight[step], begin)), None)
    if start is None:
        return "begins with weights that no step had"
    for step in range(1, STEPS - start + 1):
        if not torch.equal(weights(folder / "resumed", step), straight[start + step]):
            return f"leaves the run {step} steps after step {start}"
    return f"bitwise from step {start} to {STEPS}"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the rows as JSON")
    parser.add_argument("--only", help="cases whose name contains this")
    options = parser.parse_args()
    rows, wrong = [], []
    for case in right():
        if not case.path.is_file() or (options.only and options.only not in case.name):
            continue
        with tempfile.TemporaryDirectory() as folder:
            row = examine(case, Path(folder))
        ok = "failed" not in row and ("why" in row or row["apart"] <= ALLOWED)
        ok = ok and str(row.get("resumed", "bitwise")).startswith("bitwise")
        wrong += [case.name] * (not ok)
        rows.append(row)
        reported = " ".join(row.get(key, "") for key in ("resumed", "why", "failed"))
        print(
            f"{'ok' if ok else 'WRONG':<6}{case.name:<40}{row['apart']!s:<24}{reported}", flush=True
        )
    print(f"{len(rows) - len(wrong)} of {len(rows)} right scripts shown right")
    if options.out:
        write(
            options.out,
            {"environment": environment(), "allowed": ALLOWED, "steps": STEPS, "rows": rows},
        )
    return 1 if wrong else 0


if __name__ == "__main__":
    raise SystemExit(main())
