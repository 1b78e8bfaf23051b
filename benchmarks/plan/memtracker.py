"""The peak that torch's own FSDPMemTracker computes for a case of published.yaml: `python benchmarks/plan/memtracker.py NAME`.

It follows FSDP2 under FakeTensorMode, on the device of the mesh; without CUDA in the process that is the CPU. Prints GiB by kind as JSON.
"""

import json
import shlex
import sys
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import yaml
from llama import SIZES, Decoder, RMSNorm, apply_ac, apply_fsdp, arguments, mean_loss
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.fsdp2_mem_tracker import FSDPMemTracker
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

GIB = 1 << 30


def main() -> None:
    cases = yaml.safe_load(Path(__file__).with_name("published.yaml").read_text())["cases"]
    case = next(case for case in cases if case["name"] == sys.argv[1])
    args = arguments(shlex.split(case["args"]))
    dist.init_process_group("fake", rank=0, world_size=case["nproc"], store=FakeStore())
    mesh = init_device_mesh("cpu", (case["nproc"],), mesh_dim_names=("dp_shard",))
    with FakeTensorMode(allow_non_fake_inputs=True):
        with torch.device("meta"):
            model = Decoder(
                SIZES[args.size], args.sequence, RMSNorm if args.norm == "composed" else partial(nn.RMSNorm, eps=1e-5)
            )
        if args.ac != "none":
            apply_ac(model, args.ac)
        apply_fsdp(model, mesh, args.reshard, args.split, getattr(torch, args.reduce_dtype))
        model.to_empty(device="cpu")
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, foreach=True)
        tracker = FSDPMemTracker(model, optimizer)
        tokens = torch.randint(SIZES[args.size][-1], (args.batch, args.sequence + 1))
        tracker.track_inputs((tokens,))
        with tracker:
            for step in range(2):
                logits = model(tokens[:, :-1])
                logits = logits.float() if args.keep_logits else logits
                loss = mean_loss(logits, tokens[:, 1:], args.loss_chunks)
                if not args.keep_logits:
                    del logits
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                if step == 0:
                    tracker.reset_mod_stats()
        snapshot = tracker.get_tracker_snapshot("peak")
    peak = {
        str(getattr(kind, "value", kind)): round(size / GIB, 2) for kind, size in snapshot[torch.device("cpu")].items()
    }
    print(json.dumps({"name": case["name"], "peak": peak}))


if __name__ == "__main__":
    main()
