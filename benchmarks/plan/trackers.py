"""Torch's own tracker of memory beside `fsdp2 plan`: FSDPMemTracker on cases of published.yaml and
real.yaml that run llama.py.

`python benchmarks/plan/trackers.py NAME... [--cuda]` stores the peak in
benchmarks/results/plan_trackers.json, beside what the plan says and what was reported, or allocated
on real tensors. The tracker needs a model that it is given, so the training step of llama.py is
called from here, on fake tensors: of the CPU, since a torch without CUDA has no others (`--cuda`
stores the error).
"""

import json
import shlex
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import yaml
from llama import SIZES, Decoder, RMSNorm, apply_ac, apply_fsdp, arguments, mean_loss
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

sys.path.append(str(Path(__file__).parents[1]))  # for results_file

from results_file import write

HERE = Path(__file__).parent
RESULTS = HERE.parent / "results"
RESULT = RESULTS / "plan_trackers.json"
STEPS, MIB = 2, 1 << 20


def tracked(words: str, nproc: int, device: str) -> dict[str, Any]:
    """The peak of a case, by kind."""
    args, started = arguments(shlex.split(words)), time.process_time()
    dist.init_process_group("fake", rank=0, world_size=nproc, store=FakeStore())
    mesh = init_device_mesh(device, (nproc,))  # it reads its ranks
    with FakeTensorMode():
        size = SIZES[args.size] if args.layers is None else (args.layers, *SIZES[args.size][1:])
        with torch.device("meta"):
            model = Decoder(
                size,
                args.sequence,
                RMSNorm if args.norm == "composed" else partial(nn.RMSNorm, eps=1e-5),
            )
        if args.ac != "none":
            apply_ac(model, args.ac)
        apply_fsdp(model, mesh, args.reshard, args.split, torch.float32)
        model.to_empty(device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=False, foreach=False)
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            for step in range(STEPS):
                tokens = torch.zeros(
                    args.batch, args.sequence + 1, dtype=torch.int64, device=device
                )
                optimizer.zero_grad()
                logits = model(tokens[:, :-1])
                if args.keep_logits:
                    logits = logits.float()
                loss = mean_loss(logits, tokens[:, 1:], args.loss_chunks)
                if not args.keep_logits:
                    del logits
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=False)
                optimizer.step()
                if step == 0:
                    tracker.reset_mod_stats()
        found = tracker.get_tracker_snapshot("peak")
    dist.destroy_process_group()
    kinds = {
        getattr(kind, "value", str(kind)): amount
        for kind, amount in found[torch.device(device)].items()
    }
    row = {
        "tracker": round(kinds.pop("Total") / MIB, 3),
        "seconds": round(time.process_time() - started, 1),
    }
    return row | {
        "kinds": {kind: round(amount / MIB, 3) for kind, amount in kinds.items() if amount}
    }


def beside(name: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """A case, and MiB of the same by the plan and by others."""
    published, real = (
        yaml.safe_load((HERE / f"{file}.yaml").read_text())["cases"]
        for file in ("published", "real")
    )
    stored = {row["name"]: row for row in json.loads((RESULTS / "plan.json").read_text())["cases"]}
    counted = {
        row["name"]: row for row in json.loads((RESULTS / "plan_real.json").read_text())["rows"]
    }
    for case in published:
        if case["name"] == name:
            reported = {f"reported_{kind}": gib * 1024 for kind, gib in case.get("gib", {}).items()}
            return case, {"plan": round(stored[name]["active"] * 1024), **reported}
    case = next(one for one in real if one["name"] == name)
    allocated = counted[name]["mib"]
    plan = round(allocated * (1 + counted[name]["peak"]), 3)
    return {**case, "nproc": case.get("ranks", 2)}, {"plan": plan, "allocated": allocated}


def main() -> None:
    device = "cuda" if "--cuda" in sys.argv else "cpu"
    kept = (
        {row["name"]: row for row in json.loads(RESULT.read_text())["rows"]}
        if RESULT.is_file()
        else {}
    )
    for name in (word for word in sys.argv[1:] if word != "--cuda"):
        case, others = beside(name)
        row = {
            "name": name if device == "cpu" else f"{name} on {device}",
            "nproc": case["nproc"],
            **others,
        }
        try:
            row |= tracked(case["args"], case["nproc"], device)
        except Exception as error:
            row["error"] = f"{type(error).__name__}: {error}"[:300]
            dist.destroy_process_group()
        kept[row["name"]] = row
        print(row, flush=True)
        write(RESULT, {"rows": list(kept.values())})


if __name__ == "__main__":
    main()
