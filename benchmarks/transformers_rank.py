"""What one rank of a generated project holds, reported by rank 0 as JSON: run by
transformers_models.py under torchrun.

    torchrun --nproc-per-node 2 transformers_rank.py PROJECT FOLDER OUT [CHECKPOINT]

Builds the model as train.py does, holds it against FOLDER as transformers itself opens it, and
saves it as a checkpoint; with CHECKPOINT, loads that first.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

PROJECT, FOLDER, OUT = (Path(word) for word in sys.argv[1:4])
sys.path.insert(0, str(PROJECT))


def whole(value: Any) -> torch.Tensor:
    """The tensor of all ranks."""
    found: torch.Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
    return found.detach().clone()


def main() -> None:
    import model as built  # type: ignore[import-not-found]
    from checkpoint import Checkpointer, TrainState, load_checkpoint  # type: ignore[import-not-found]
    from data import load_data  # type: ignore[import-not-found]
    from distributed import build_mesh, init_distributed  # type: ignore[import-not-found]
    from optim import build_optimizer, build_scheduler  # type: ignore[import-not-found]
    from settings import Settings  # type: ignore[import-not-found]
    from transformers import AutoModelForCausalLM

    device = init_distributed()
    model = built.build_model(build_mesh(device), device, 0)
    optimizer = build_optimizer(model, Settings())
    samples = len(load_data(built.SEQUENCE_LENGTH)[0])
    base = [built.fingerprint()] if hasattr(built, "fingerprint") else []
    state = TrainState(model, optimizer, build_scheduler(optimizer, Settings()), samples, *base)
    if len(sys.argv) > 4:
        load_checkpoint(Path(sys.argv[4]), state)
    OUT.mkdir(parents=True, exist_ok=True)
    (OUT / "checkpoints").mkdir(exist_ok=True)
    Checkpointer(OUT, 1, -1).save(state)

    original = AutoModelForCausalLM.from_pretrained(FOLDER, dtype=torch.float32)
    mine = {name: whole(value) for name, value in model.named_parameters()}
    theirs = dict(original.named_parameters())
    buffers = {name: whole(value) for name, value in model.named_buffers()}
    wanted = dict(original.named_buffers())
    tokens = torch.arange(64).view(2, 32) * 3 % 256
    model.train(False)
    with torch.no_grad():
        logits = whole(model(tokens, use_cache=False).logits)
        expected = original.train(False)(tokens, use_cache=False).logits
    if torch.distributed.get_rank() == 0:
        trained = [name for name, value in model.named_parameters() if value.requires_grad]
        moved = [name for name in trained if "lora_B" in name and bool(mine[name].any())]
        reported = {
            "parameters": len(theirs),
            "equal_parameters": sum(
                name in mine and torch.equal(mine[name], theirs[name]) for name in theirs
            ),
            "buffers": len(wanted),
            "equal_buffers": sum(
                name in buffers and torch.equal(buffers[name], wanted[name]) for name in wanted
            ),
            "trained": len(trained),
            "adapters_moved": len(moved),
            "tied": len(dict(model.named_parameters(remove_duplicate=False))) - len(mine),
            "logits_apart": float((logits - expected).abs().max()),
        }
        (OUT / "reported.json").write_text(json.dumps(reported))
        torch.save({"tokens": tokens, "logits": logits}, OUT / "held.pt")
    torch.distributed.barrier()
    torch.distributed.destroy_process_group()


main()
