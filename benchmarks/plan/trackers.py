"""Torch's own trackers of memory beside `fsdp2 plan`: FSDPMemTracker on cases of published.yaml, on fake CPU tensors.

`python benchmarks/plan/trackers.py NAME...` adds `tracker` (GiB at the peak, by kind, seconds) to these cases in
benchmarks/results/plan.json. On fake CUDA tensors a torch without CUDA cannot run it: `--cuda` shows the error. The tracker sees what the
script gives it, so the training step of llama.py is called from here. Its kernels are those of the CPU.
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

from rehearse import GIB
from results_file import write

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "plan.json"
STEPS = 2


def tracked(words: str, nproc: int, device: str) -> dict[str, Any]:
    """The peak of a case, by kind."""
    args, started = arguments(shlex.split(words)), time.process_time()
    dist.init_process_group("fake", rank=0, world_size=nproc, store=FakeStore())
    with FakeTensorMode():
        size = SIZES[args.size] if args.layers is None else (args.layers, *SIZES[args.size][1:])
        with torch.device("meta"):
            model = Decoder(size, args.sequence, RMSNorm if args.norm == "composed" else partial(nn.RMSNorm, eps=1e-5))
        if args.ac != "none":
            apply_ac(model, args.ac)
        apply_fsdp(model, init_device_mesh(device, (nproc,)), args.reshard, args.split, torch.float32)
        model.to_empty(device=device)
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=False, foreach=args.adamw == "foreach")
        tracker = FSDPMemTracker(model, optimizer)
        with tracker:
            for step in range(STEPS):
                tokens = torch.zeros(args.batch, args.sequence + 1, dtype=torch.int64, device=device)
                optimizer.zero_grad()
                logits = model(tokens[:, :-1])
                if args.keep_logits:
                    logits = logits.float()
                loss = mean_loss(logits, tokens[:, 1:], args.loss_chunks)
                if not args.keep_logits:
                    del logits
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0, foreach=True)
                optimizer.step()
                if step == 0:
                    tracker.reset_mod_stats()
        found = tracker.get_tracker_snapshot("peak")
    dist.destroy_process_group()
    kinds = {getattr(kind, "value", str(kind)): amount for kind, amount in found[torch.device(device)].items()}
    row = {"gib": round(kinds.pop("Total") / GIB, 2), "seconds": round(time.process_time() - started, 1)}
    return row | {"kinds": {kind: round(amount / GIB, 2) for kind, amount in kinds.items() if amount > GIB // 100}}


def main() -> None:
    device = "cuda" if "--cuda" in sys.argv else "cpu"
    names = [name for name in sys.argv[1:] if name != "--cuda"]
    cases = {case["name"]: case for case in yaml.safe_load((HERE / "published.yaml").read_text())["cases"]}
    for name in names:
        found = tracked(cases[name]["args"], cases[name]["nproc"], device)
        results = json.loads(RESULT.read_text())
        for row in results["cases"]:
            if row["name"] == name:
                row["tracker"] = found
                print(name, found, "plan", row["active"])
        write(RESULT, results)


if __name__ == "__main__":
    main()
