"""Kill a random rank of a generated project at random moments, resume on other ranks: no sample
lost or repeated, the same loss.

    python benchmarks/scaffold_kill.py --out benchmarks/results/scaffold_kill.json

A run saves every second step (sync, thread and process in turn). At a random moment a random rank
gets SIGKILL; other trials send SIGTERM to torchrun. Then the run is resumed on another number of
ranks and goes to its end. Each rank writes down the samples of every optimizer step that it makes
(`record` below runs train.py as it is, with two listeners). The steps up to the checkpoint from the
first part and those after it from the second must be the samples of the undisturbed run, in its
order. The losses must be those of the undisturbed run within TIMES the largest difference between
undisturbed runs on 1, 2 and 4 ranks. Controls: projects that are broken on purpose must be noticed.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import re
import runpy
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from machine import environment
from results_file import write
from verified_fsdp2.verifier.isolation.proc import children, descendants
from verified_fsdp2.verifier.launch.processes import runs

STEPS, EVERY = 24, 2
RANKS = (1, 2, 4)
MODES = ("sync", "thread", "process")
TIMES = 4  # a resumed run is made of two parts, each on ranks of its own
PATIENCE = 120
SPEC = {
    "version": 1,
    "model": {
        "kind": "decoder",
        "layers": 2,
        "width": 32,
        "heads": 2,
        "vocabulary": 64,
        "sequence_length": 16,
    },
    "data": {"kind": "synthetic", "samples": 101},
    "precision": {"param_dtype": "float32"},
    "optimizer": {"lr": 0.01},
    "schedule": {"warmup_steps": 2},
    "train": {"steps": STEPS, "global_batch": 8, "max_norm": 0.5},
    "verify": {"reshard_to": []},
}
CONTROLS = {
    "the data position is not restored": (
        'state.step, state.samples = saved["step"], saved["samples"]',
        'state.step, state.samples = saved["step"], 0',
    ),
    "the optimizer is not restored": (
        "        state.optimizer,\n        model_state",
        "        [],\n        model_state",
    ),
}


def record(log: Path) -> None:
    """Inside a rank: run train.py of this folder, and write down the samples of each optimizer
    step.
    """
    sys.path.insert(0, str(Path.cwd()))
    import data
    import torch.distributed as dist
    from torch.optim.optimizer import register_optimizer_step_post_hook

    taken: list[tuple[int, list[int]]] = []
    real = data.GlobalBatches.micro_batches

    def noted(loader: Any, position: int) -> Any:
        taken[:] = [(position, loader.indices(position, dist.get_rank(), dist.get_world_size()))]
        return real(loader, position)

    def stepped(*_: object) -> None:
        if taken:
            position, samples = taken.pop()
            with (log / f"{os.getpid()}.jsonl").open("a") as file:
                file.write(
                    json.dumps({"position": position, "rank": dist.get_rank(), "samples": samples})
                    + "\n"
                )

    data.GlobalBatches.micro_batches = noted
    register_optimizer_step_post_hook(stepped)
    runpy.run_path("train.py", run_name="__main__")


def samples_of(log: Path) -> dict[int, list[int]]:
    """{data position: the samples of that step over all ranks, in the order of the ranks}; what not
    all ranks did is partial.
    """
    lines = [
        json.loads(line) for file in log.glob("*.jsonl") for line in file.read_text().splitlines()
    ]
    found: dict[int, list[int]] = {}
    for line in sorted(lines, key=lambda line: (line["position"], line["rank"])):
        found.setdefault(line["position"], []).extend(line["samples"])
    return found


class Launch:
    """A project under torchrun; its output is read as it comes."""

    def __init__(self, project: Path, ranks: int, out: Path, log: Path, *flags: str) -> None:
        log.mkdir(parents=True, exist_ok=True)
        launcher = [
            sys.executable,
            "-m",
            "torch.distributed.run",
            "--standalone",
            "--nproc-per-node",
            str(ranks),
        ]
        inside = [
            __file__,
            "--inside",
            str(log),
            "--",
            "--out",
            str(out),
            "--checkpoint-interval",
            str(EVERY),
        ]
        inherited = {**os.environ, "OMP_NUM_THREADS": "1"}
        self.began = time.monotonic()
        self.process = subprocess.Popen(
            [*launcher, *inside, *flags],
            cwd=project,
            env=inherited,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        self.said = ""
        self.members: set[int] = set()

    def until_step(self, step: int) -> bool:
        """Read until this step is shown."""
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.said += line
            if re.match(rf"step +{step} ", line):
                self.members = set(descendants(self.process.pid))
                return True
        return False

    def ranks(self) -> list[int]:
        """The processes of the ranks, as torchrun started them."""
        return sorted(children(self.process.pid))

    def finish(self) -> int:
        """Wait for the end, bounded; nothing that it started may live on."""
        try:
            rest, _ = self.process.communicate(timeout=PATIENCE)
            self.said += rest
        finally:
            for pid in (self.process.pid, *self.members) if self.process.poll() is None else ():
                kill(pid, signal.SIGKILL)
        until = time.monotonic() + 5
        while any(runs(pid) for pid in self.members) and time.monotonic() < until:
            time.sleep(0.1)
        return self.process.returncode

    def left(self) -> int:
        """Processes that outlive torchrun."""
        return sum(map(runs, self.members))


def kill(pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


@dataclass
class History:
    """What a run did: the loss of each step, the samples of each step."""

    losses: list[float]
    samples: dict[int, list[int]]
    problems: list[str] = field(default_factory=list)


def losses_of(out: Path) -> tuple[list[float], list[str]]:
    """The losses of the newest run, and what is wrong with their steps."""
    run = sorted(out.glob("run-*"))[-1]
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [record["step"] for record in records if "loss" in record]
    wrong = [] if steps == list(range(1, STEPS + 1)) else [f"steps in metrics.jsonl: {steps}"]
    final = [record["validation_loss"] for record in records if "validation_loss" in record]
    return [record["loss"] for record in records if "loss" in record] + final[-1:], wrong


def undisturbed(project: Path, ranks: int, folder: Path) -> History:
    launch = Launch(project, ranks, folder / "out", folder / "log")
    launch.until_step(STEPS)
    if launch.finish() != 0:
        raise SystemExit(launch.said[-3000:])
    losses, wrong = losses_of(folder / "out")
    return History(losses, samples_of(folder / "log"), wrong)


def difference(one: list[float], other: list[float]) -> float:
    """The largest relative one; infinite if there are not as many."""
    if len(one) != len(other):
        return float("inf")
    return max(abs(a - b) / abs(b) for a, b in zip(one, other, strict=True))


def checkpoints(out: Path) -> list[int]:
    return sorted(
        int(path.name[5:])
        for path in out.glob("run-*/checkpoints/step_*")
        if path.name[5:].isdecimal()
    )


def disturb(launch: Launch, kind: str, chance: random.Random) -> dict[str, Any]:
    """Kill or stop a launch at a random moment."""
    step, delay = chance.randrange(4, STEPS), round(chance.uniform(0.0, 0.4), 3)
    launch.until_step(step)
    time.sleep(delay)
    pids = launch.ranks()
    number = chance.randrange(len(pids)) if pids else None
    launch.members |= set(descendants(launch.process.pid))
    if kind == "SIGTERM":
        launch.process.send_signal(signal.SIGTERM)
        number = None
    elif number is not None:
        kill(pids[number], signal.SIGKILL)
    return {"at_step": step, "delay": delay, "rank": number}


def trial(
    projects: dict[str, Path], kind: str, seed: int, folder: Path, reference: History
) -> dict[str, Any]:
    """Disturb a run, resume it elsewhere, and judge it."""
    chance = random.Random(seed)
    mode = MODES[seed % len(MODES)]
    before = chance.choice([2, 4])
    after = chance.choice([ranks for ranks in RANKS if ranks != before])
    began = time.monotonic()
    first = Launch(projects[mode], before, folder / "out", folder / "first")
    row = {"kind": kind, "seed": seed, "mode": mode, "ranks": before, "resumed_on": after}
    row |= disturb(first, kind, chance)
    status = first.finish()
    saved = checkpoints(folder / "out")
    step = saved[-1] if saved else 0
    second = Launch(
        projects[mode], after, folder / "out", folder / "second", *(["--resume"] if saved else [])
    )
    second.until_step(STEPS)
    ended = second.finish()
    row |= {"resumed_from": step, "torchrun": status, "left": first.left() + second.left()}
    problems = (
        [] if ended == 0 or f"step {STEPS:>6}  validation" in second.said else [second.said[-1500:]]
    )
    if (
        kind == "SIGTERM"
        and f"step {STEPS:>6}  loss" not in first.said
        and "stopped by a signal" not in first.said
    ):
        problems.append("no word of the signal: " + first.said[-1500:])
    if not problems:
        row["difference"], wrong = judge(folder, step, reference)
        problems += wrong
    if row["left"]:
        problems.append("a process lives on")
    return {**row, "problems": problems, "seconds": round(time.monotonic() - began, 1)}


def judge(folder: Path, step: int, reference: History) -> tuple[float, list[str]]:
    """The difference of the losses, and what is wrong with the samples."""
    batch = SPEC["train"]["global_batch"]  # type: ignore[index]
    early, late = samples_of(folder / "first"), samples_of(folder / "second")
    made = {p: s for p, s in early.items() if p < step * batch} | {
        p: s for p, s in late.items() if p >= step * batch
    }
    problems = [f"samples of step {p // batch} again" for p in late if p < step * batch]
    if made != reference.samples:
        apart = sorted(
            p for p in {*made, *reference.samples} if made.get(p) != reference.samples.get(p)
        )
        problems.append(f"other samples at positions {apart[:5]}")
    losses, wrong = losses_of(folder / "out")
    return difference(losses, reference.losses), problems + wrong


def write_projects(folder: Path) -> dict[str, Path]:
    import yaml

    from verified_fsdp2.skill import scaffold, spec

    (folder / "spec.yaml").write_text(yaml.safe_dump(SPEC), encoding="utf-8")
    found = {}
    for mode in MODES:
        loaded = spec.load(folder / "spec.yaml", [f"checkpoint.mode={mode}"])
        scaffold.write(scaffold.render(loaded), folder / mode)
        found[mode] = folder / mode
    return found


def sabotaged(folder: Path, old: str, new: str) -> dict[str, Path]:
    """The projects, broken."""
    folder.mkdir()
    projects = write_projects(folder)
    for project in projects.values():
        file = project / "checkpoint.py"
        text = file.read_text()
        assert text.count(old) == 1, old
        file.write_text(text.replace(old, new))
    return projects


def measure(folder: Path, kills: int, stops: int) -> dict[str, Any]:
    projects = write_projects(folder)
    straight = {
        ranks: undisturbed(projects["sync"], ranks, folder / f"straight-{ranks}") for ranks in RANKS
    }
    reference = straight[2]
    noise = max(difference(history.losses, reference.losses) for history in straight.values())
    limit = TIMES * noise
    if any(
        history.samples != reference.samples or history.problems for history in straight.values()
    ):
        raise SystemExit("the undisturbed runs do not take the same samples")
    rows = []
    for number in range(kills + stops):
        kind = "SIGKILL" if number < kills else "SIGTERM"
        row = trial(projects, kind, number, folder / f"trial-{number}", reference)
        rows.append({**row, "ok": not row["problems"] and row["difference"] <= limit})
        print(json.dumps(rows[-1]), flush=True)
    controls = []
    for number, (name, (old, new)) in enumerate(CONTROLS.items()):
        broken = sabotaged(folder / f"broken-{number}", old, new)
        row = trial(broken, "SIGTERM", 3 * number, folder / f"control-{number}", reference)
        noticed = bool(row["problems"]) or row["difference"] > limit
        controls.append({"control": name, "noticed": noticed, **row})
        print(json.dumps(controls[-1]), flush=True)
    return {"noise": noise, "limit": limit, "trials": rows, "controls": controls}


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, help="write the results as JSON")
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--stops", type=int, default=10)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        results = measure(Path(folder), options.kills, options.stops)
    results = {"environment": environment(), "steps": STEPS, "saved_every": EVERY, **results}
    if options.out:
        write(options.out, results)
    good = sum(row["ok"] for row in results["trials"])
    noticed = sum(row["noticed"] for row in results["controls"])
    print(
        f"{good} of {len(results['trials'])} trials end as the undisturbed run (losses within"
        f" {results['limit']:.1e}); {noticed} of {len(CONTROLS)} broken projects noticed"
    )
    return 0 if good == len(results["trials"]) and noticed == len(CONTROLS) else 1


if __name__ == "__main__":
    if sys.argv[1:2] == ["--inside"]:
        log, sys.argv = Path(sys.argv[2]), ["train.py", *sys.argv[4:]]
        record(log)
    else:
        raise SystemExit(main())
