"""Write what a small run of lingua's apps/main needs into a folder: JSON lines in two chunks, and a
configuration.
"""

import json
import random
import sys
from pathlib import Path

CONFIG = """\
name: tiny
dump_dir: {folder}/run
steps: 8
seed: 777
optim: {{lr: 3e-3, warmup: 4, clip: 1.0}}
distributed:
  {{fsdp_type: full_shard, dp_shard: 1, dp_replicate: 1, compile: false, model_dtype: fp32,
    spawn_method: fork, tp_size: 1}}
model: {{dim: 32, n_layers: 2, n_heads: 2, multiple_of: 32}}
data:
  root_dir: {folder}/shuffled
  sources: {{words: 1.0}}
  batch_size: 4
  prefetch_size: 8
  seq_len: 32
  n_views: 2
  load_async: false
  tokenizer: {{name: bytes}}
profiling: {{run: false}}
checkpoint:
  dump: {{every: 100, keep: -1}}
  eval: {{every: 100, keep: -1}}
logging: {{freq: 1}}
"""


def main(folder: Path) -> None:
    words = (
        "the",
        "model",
        "loss",
        "weight",
        "rank",
        "shard",
        "step",
        "gather",
        "reduce",
        "batch",
        "mean",
        "of",
    )
    draw = random.Random(0)
    chunks = folder / "shuffled" / "words"
    chunks.mkdir(parents=True, exist_ok=True)
    for number in range(2):
        lines = (json.dumps({"text": " ".join(draw.choices(words, k=40))}) for _ in range(200))
        (chunks / f"words.chunk.{number:02}.jsonl").write_text(
            "\n".join(lines) + "\n", encoding="utf-8"
        )
    (folder / "tiny.yaml").write_text(CONFIG.format(folder=folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
