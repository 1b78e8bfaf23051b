"""All that needs GPUs, for `gpu.sh`: verdicts with `--device cuda`, and what the scaffold's
projects do there.

    python benchmarks/gpu.py OUT.json [--rehearse] [--parts verdicts training saves]

- verdicts: right scripts and faults of the corpus, spelled for GPUs (for_gpus.py), through the
  whole verifier. With fewer GPUs than ranks, the ranks share them (`--oversubscribe`).
- training: a decoder of the scaffold with one option changed at a time, on one rank a GPU: MFU and
  peak memory of a rank; the first row is a bare loop around the same model. MFU counts all tokens
  of a batch, those that the loss ignores too. `--beside "torchrun ... -m torchtitan.train ..."`
  adds a row for another trainer that logs as torchtitan does, at its own settings.
- saves: async_save.py.

OUT is written after each verdict, option and part, so an interruption loses little.
`--rehearse`: no GPU, CUDA computes on the CPU, small sizes.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import torch
import yaml
from async_save import SPEC as SAVED
from async_save import launch as saves_of
from for_gpus import RESPELLED, for_gpus

from corpus import IN_EVERY_TEST_RUN, REPRESENTATIVE, TESTS, Case, faults, load
from detection import judge
from machine import environment
from results_file import with_section, write
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.verifier.isolation.leftovers import temporary
from verified_fsdp2.verifier.isolation.worlds import wish
from verified_fsdp2.verifier.launch.client import Launcher

RANKS = 2
AT_A_TIME = 4  # verifications, on a machine with 16 cores
HEADING = "## On GPUs"
STARTED, BUDGET = (
    time.monotonic(),
    22 * 60,
)  # seconds after which no training begins: all takes half an hour at most
LIMIT = 180  # seconds for one launch of the training
WARM = 5  # steps that are not counted
MODEL = {
    "kind": "decoder",
    "layers": 16,
    "width": 1536,
    "heads": 12,
    "vocabulary": 32000,
    "sequence_length": 2048,
}
SMALL = {
    "kind": "decoder",
    "layers": 2,
    "width": 64,
    "heads": 4,
    "vocabulary": 256,
    "sequence_length": 64,
}
Keep = Callable[[dict[str, Any]], None]  # stores the rows so far
OPTIONS: dict[str, list[str]] = {
    "default": [],
    "no resharding after forward": ["parallel.reshard_after_forward=false"],
    "compile": ["memory.compile=true"],
    "compile, fp8": ["memory.compile=true", "precision.fp8=true"],
    "selective checkpointing": ["memory.activation_checkpointing=op-selective"],
    "selective checkpointing, compile": [
        "memory.activation_checkpointing=op-selective",
        "memory.compile=true",
    ],
    "full checkpointing": ["memory.activation_checkpointing=full"],
    "full checkpointing, compile": ["memory.activation_checkpointing=full", "memory.compile=true"],
    "offload": ["parallel.cpu_offload=true"],
}
BARE = """
import json, sys, time
import torch, torch.distributed as dist, torch.nn.functional as F
import data, distributed, flops, model, optim, settings, train
steps, micro, parts = map(int, sys.argv[1:])
device = distributed.init_distributed()
net = model.build_model(model.ModelConfig(), distributed.build_mesh(device), device, 0)
optimizer = optim.build_optimizer(net, settings.Settings())
config = model.ModelConfig()
tokens = torch.randint(0, config.vocabulary, (micro, config.sequence_length + 1)).to(device)
for step in range(steps):
    if step == 5:
        finish = torch.cuda.synchronize if device.type == "cuda" else lambda: None
        finish(); dist.barrier(); began = time.perf_counter()
    for _ in range(parts):
        logits = net(tokens[:, :-1])
        (F.cross_entropy(logits.flatten(0, -2).float(), tokens[:, 1:].flatten()) / parts).backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
finish(); dist.barrier()
seconds = time.perf_counter() - began
peak = torch.cuda.max_memory_allocated() / 2**20 if torch.cuda.is_available() else 0.0
if dist.get_rank() == 0:
    used = (steps - 5) * flops.ideal_seconds(net, parts * micro * dist.get_world_size()) / seconds
    print(json.dumps({"mfu": used, "peak_memory_mib": peak}))
dist.barrier()
dist.destroy_process_group()
"""


def verdicts(rehearse: bool, keep: Keep) -> dict[str, Any]:
    """Each right script and fault that needs no other change than its spelling."""
    names = {*IN_EVERY_TEST_RUN, *REPRESENTATIVE}
    seeded = [
        case
        for case in faults()
        if case.name in names and case.kind != "project" and case.tier == "ranks"
    ]
    cases = [
        load(TESTS / "zoo" / f"{name}.py") for name in (*RESPELLED, "written_for_gpus")
    ] + seeded
    if rehearse:
        cases = [case for case in cases if case.name in IN_EVERY_TEST_RUN]
    shared = 0 < torch.cuda.device_count() < 4
    free: SimpleQueue[Launcher] = SimpleQueue()
    done: list[dict[str, Any]] = []

    def one(case: Case) -> dict[str, Any]:
        launcher = free.get()
        try:
            settings = {
                **case.settings,
                **({} if rehearse else {"device": "cuda", "oversubscribe": shared}),
            }
            row = judge(
                case, settings, launcher, None if case.name == "zoo/written_for_gpus" else for_gpus
            )
        finally:
            free.put(launcher)
        print(f"  {case.name:<45}{row['seconds']:>7} s  {', '.join(row['failed'])}", flush=True)
        done.append(
            {
                key: row[key]
                for key in ("case", "rule", "first", "failed", "inconclusive", "seconds")
            }
        )
        keep({"rows": done})
        return row

    at_a_time = 1 if rehearse else min(AT_A_TIME, max(1, (os.cpu_count() or 1) // 4))
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(at_a_time) as pool:
        for _ in range(at_a_time):
            device, own = "auto" if rehearse else "cuda", wish(temporary("runs"))
            free.put(
                stack.enter_context(Launcher(device=device, ranks=RANKS, share=shared, wish=own))
            )
        rows = list(pool.map(one, cases))
    return {
        "shared": shared,
        "rights_failed": {
            row["case"]: row["evidence"] for row in rows if not row["rule"] and row["failed"]
        },
        "missed": [row["case"] for row in rows if row["rule"] and not row["found"]],
        "rows": done,
    }


def training(rehearse: bool, keep: Keep) -> dict[str, Any]:
    """MFU and peak memory of a rank, by option; the loss says that all of them learn."""
    ranks = torch.cuda.device_count() or 1
    micro, steps = (2, 15) if rehearse else (8, 30)
    parts = 1 if ranks > 1 else 2  # a spec is for two ranks or more: one rank accumulates
    base = {
        "version": 1,
        "model": SMALL if rehearse else MODEL,
        "data": {"kind": "synthetic", "samples": 4096},
        "train": {
            "steps": 1000,
            "global_batch": micro * parts * ranks,
            "micro_batch": micro,
            "validate_interval": 0,
            "log_interval": 5,
        },
        "checkpoint": {"interval": 1000},
        "operation": {"mfu": True, **({"peak_tflops": 1.0} if rehearse else {})},
        "verify": {"reshard_to": []},
    }
    rows = []
    for name, changes in OPTIONS.items():
        if time.monotonic() - STARTED > BUDGET:
            rows.append({"option": name, "error": f"not run: {BUDGET // 60} minutes were over"})
            continue
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "spec.yaml"
            path.write_text(yaml.safe_dump(base), encoding="utf-8")
            try:
                project = Path(folder) / "project"
                scaffold.write(scaffold.render(spec.load(path, changes)), project)
                if not rows:
                    (project / "bare.py").write_text(BARE, encoding="utf-8")
                    rows.append(
                        {
                            "option": "bare loop",
                            **json.loads(
                                launched(project, ranks, "bare.py", steps, micro, parts)[-1]
                            ),
                        }
                    )
                    print(json.dumps(rows[-1]), flush=True)
                launched(project, ranks, "train.py", "--steps", steps, "--out", "out")
                rows.append({"option": name, **measured(project / "out")})
            except Exception as error:
                rows.append({"option": name, "error": str(error)})
        print(json.dumps(rows[-1]), flush=True)
        keep({"rows": rows})
    return {
        "ranks": ranks,
        "model": base["model"],
        "micro_batch": micro,
        "accumulated": parts,
        "rows": rows,
    }


def beside(command: str) -> dict[str, Any]:
    """The row of another trainer, from the lines that it logs as torchtitan does: `memory:
    30.04GiB(38%)  tps: 99,000  mfu: 36.50%`.
    """
    try:
        done = subprocess.run(
            shlex.split(command), capture_output=True, text=True, timeout=3 * LIMIT, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        return {"option": command, "error": str(error)}
    plain = re.sub(r"\x1b\[[0-9;]*m", "", done.stdout + done.stderr)
    found = re.findall(r"memory: +([\d.]+)GiB.*?tps: +([\d,]+).*?mfu: +([\d.]+)%", plain)
    if not found:
        return {
            "option": command,
            "error": f"exit {done.returncode}, and no line with memory, tps and mfu",
        }
    memory, _, mfu = zip(*found[min(WARM, len(found) - 1) :], strict=True)
    used, peak = statistics.median(map(float, mfu)) / 100, 1024 * max(map(float, memory))
    return {"option": command, "mfu": used, "peak_memory_mib": peak}


def launched(project: Path, ranks: int, *command: Any) -> list[str]:
    """The lines that a script prints under torchrun.

    Raises RuntimeError with the first of its errors.
    """
    launcher = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        str(ranks),
    ]
    done = subprocess.run(
        [*launcher, *map(str, command)],
        cwd=project,
        capture_output=True,
        text=True,
        timeout=LIMIT,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(done.stderr.strip().partition("\n")[0][:500])
    return done.stdout.splitlines()


def measured(out: Path) -> dict[str, float]:
    """Medians of metrics.jsonl of the one run below `out`, without its first steps; the peak is the
    last.
    """
    (file,) = out.rglob("metrics.jsonl")
    lines = [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    later = [line for line in lines if line["step"] > WARM and line.get("mfu")]
    used = statistics.median(line["mfu"] for line in later)
    return {"mfu": used, "loss": later[-1]["loss"], "peak_memory_mib": later[-1]["peak_memory_mib"]}


def saves(rehearse: bool, _: Keep) -> dict[str, Any]:
    """How long a save holds the loop, by mode."""
    if rehearse:
        SAVED["model"] = {**SMALL, "sequence_length": 16}
    with tempfile.TemporaryDirectory() as folder:
        return saves_of(torch.cuda.device_count() or 1, 1 if rehearse else 3, Path(folder))


PARTS = {"verdicts": verdicts, "training": training, "saves": saves}


def table(results: dict[str, Any]) -> list[str]:
    """The section of references/reliability.md."""
    judged, trained, known = results["verdicts"], results["training"], results["environment"]
    rights, seeded = (
        [row for row in judged["rows"] if bool(row["rule"]) is fault] for fault in (False, True)
    )
    quiet = len(rights) - len(judged["rights_failed"])
    named = sum(row["first"] == row["rule"] for row in seeded)
    model = trained["model"]
    of_model = (
        f"{model['layers']} layers of width {model['width']}, {trained['micro_batch']} sequences of"
        f" {model['sequence_length']}"
    )
    return [
        HEADING,
        "",
        (
            "Made by `benchmarks/gpu.sh` and `benchmarks/gpu.py --table` from"
            " `benchmarks/results/gpu.json`; do not edit."
        ),
        (
            f"{known['gpus'][0]}, torch {known['torch']}, {len(known['gpus'])} device, which"
            f" {RANKS} or more ranks share"
        ),
        (
            f"(`--device cuda --oversubscribe`, NCCL over loopback): {len(rights) - quiet} of"
            f" {len(rights)} right scripts failed,"
        ),
        (
            f"{len(seeded) - len(judged['missed'])} of {len(seeded)} seeded faults found, {named}"
            " named by the first finding."
        ),
        "",
        f"A project of the scaffold on {trained['ranks']} rank: a decoder, {of_model} tokens in a",
        "micro-batch, bfloat16. The first row is a loop",
        "written for this measurement around the same model.",
        "",
        "| option | MFU | peak memory, GiB |",
        "|---|---|---|",
        *(f"| {row['option']} | {_measured(row)} |" for row in trained["rows"]),
        "",
    ]


def _measured(row: dict[str, Any]) -> str:
    return (
        f"{row['error']} | "
        if "error" in row
        else f"{row['mfu']:.1%} | {row['peak_memory_mib'] / 1024:.1f}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("out", type=Path)
    parser.add_argument("--rehearse", action="store_true")
    parser.add_argument(
        "--beside", metavar="COMMAND", help="another trainer on the same GPUs, such as torchtitan's"
    )
    parser.add_argument("--table", type=Path, help="only write the section of this page, from OUT")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    options = parser.parse_args()
    if options.table:
        made = table(json.loads(options.out.read_text(encoding="utf-8")))
        options.table.write_text(
            with_section(options.table.read_text(encoding="utf-8"), made), encoding="utf-8"
        )
        return 0
    gpus = [torch.cuda.get_device_name(number) for number in range(torch.cuda.device_count())]
    if not gpus and not options.rehearse:
        print("there is no CUDA device: --rehearse makes the same on the CPU", file=sys.stderr)
        return 2
    known = {**environment(), "torch": torch.__version__, "cuda": torch.version.cuda, "gpus": gpus}
    results: dict[str, Any] = {"rehearsal": options.rehearse, "environment": known}

    def keep(found: dict[str, Any]) -> None:
        write(options.out, {**results, name: found})

    for name in options.parts:
        print(f"{name}:", flush=True)
        began = time.monotonic()
        try:
            results[name] = PARTS[name](options.rehearse, keep)
            if name == "training" and options.beside:
                results[name]["rows"].append(beside(options.beside))
                print(json.dumps(results[name]["rows"][-1]), flush=True)
        except Exception as error:
            results[name] = {"error": f"{type(error).__name__}: {error}"[-2000:]}
            print(results[name]["error"], flush=True)
        results[name]["minutes"] = round((time.monotonic() - began) / 60, 1)
        write(options.out, results)
    print(f"written: {options.out}")
    return int(any("error" in results[name] for name in options.parts))


if __name__ == "__main__":
    sys.exit(main())
