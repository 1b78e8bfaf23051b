"""Write a configuration of torchtitan, a smaller Llama 3 for its `experimental.custom_import`, and
text in place of its c4_test.

python torchtitan.py FOLDER
"""

import json
import random
import sys
from pathlib import Path

MODEL = '''\
"""The debug model of torchtitan's Llama 3, smaller."""

from torchtitan.models.llama3 import TransformerModelArgs, llama3_args

llama3_args["tiny"] = TransformerModelArgs(
    dim=32, n_layers=2, n_heads=2, vocab_size=2048, rope_theta=500000
)
'''
CONFIG = """\
[experimental]
custom_import = "tiny_llama"

[model]
name = "llama3"
flavor = "tiny"

[optimizer]
lr = 1e-3

[lr_scheduler]
warmup_steps = 2

[training]
local_batch_size = 4
seq_len = 32
steps = 8
dataset = "c4_test"
dataset_path = "{folder}/c4"

[debug]
seed = 1

[metrics]
log_freq = 1

[activation_checkpoint]
mode = "none"
"""


def main(folder: Path) -> None:
    """Write everything below `folder`."""
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
    (folder / "c4").mkdir(parents=True, exist_ok=True)
    lines = (json.dumps({"text": " ".join(draw.choices(words, k=60))}) for _ in range(400))
    (folder / "c4" / "data.json").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "tiny_llama.py").write_text(MODEL, encoding="utf-8")
    (folder / "tiny.toml").write_text(CONFIG.format(folder=folder), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]).absolute())
