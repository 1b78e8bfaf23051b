"""`python dion.py FOLDER`: token files in the format of modded-nanogpt's FineWeb shards, drawn from
a Markov chain.
"""

import sys
from pathlib import Path

import numpy as np

VOCABULARY, TOKENS = 50257, {"train": 60_000, "val": 8_000}


def main(folder: Path) -> None:
    """Write `fineweb_train_000001.bin` and `fineweb_val_000000.bin`."""
    draws = np.random.default_rng(0)
    (folder / "tiny.yaml").write_text("val_loss_every: 4\nval_tokens: 64\n")
    for number, (split, count) in enumerate(reversed(TOKENS.items())):
        steps = draws.integers(1, 40, size=count)
        tokens = (np.cumsum(steps) % VOCABULARY).astype(np.uint16)
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, count
        (folder / f"fineweb_{split}_{number:06d}.bin").write_bytes(
            header.tobytes() + tokens.tobytes()
        )


if __name__ == "__main__":
    main(Path(sys.argv[1]))
