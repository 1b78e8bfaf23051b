"""Write a tiny Llama configuration of torchtitan, and text in place of its c4_test, into a folder that is put on PYTHONPATH."""

import json
import random
import sys
from pathlib import Path

CONFIG = '''\
"""The debug model of torchtitan's Llama 3, smaller."""

from dataclasses import replace

from torchtitan.models.llama3 import config_registry as llama3

DATA = {data!r}


def tiny():
    config = llama3.llama3_debugmodel()
    dataset = replace(
        config.dataloader.dataset.dataset,
        source=replace(config.dataloader.dataset.dataset.source, load_dataset_kwargs={{"data_files": DATA}}),
    )
    packed = replace(config.dataloader.dataset, dataset=dataset)
    config.dataloader = replace(config.dataloader, dataset=packed)
    config.model_spec.model.layers = config.model_spec.model.layers[:2]
    config.training.num_tokens_per_microbatch_per_dp_rank = 128
    config.training.max_context_length = 32
    config.training.steps = 8
    config.training.disable_cuda_graphs = True
    config.activation_checkpoint = None
    config.validator.enable = False
    config.parallelism.spmd_backend = "partial_dtensor"  # "spmd_types" needs a later torch than 2.13.0
    return config
'''


def main(folder: Path) -> None:
    words = ("the", "model", "loss", "weight", "rank", "shard", "step", "gather", "reduce", "batch", "mean", "of")
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(400))
    (folder / "data.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tiny_llama.py").write_text(CONFIG.format(data=str(folder / "data.json")), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).resolve())
