"""Write token files, as for OLMo-core's examples, and the user's script into a folder."""

import random
import shutil
import struct
import sys
from pathlib import Path

VOCABULARY, EOS = 50257, 50256


def main(folder: Path) -> None:
    draw = random.Random(0)
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(Path(__file__).with_name("train.py"), folder)
    for name, documents in (
        ("c4-train.00000-00099.npy", 400),
        ("c4-validation.00000-00008.npy", 40),
    ):
        tokens = [t for _ in range(documents) for t in (*draw.choices(range(100), k=40), EOS)]
        (folder / name).write_bytes(
            struct.pack(f"<{len(tokens)}H", *tokens)
        )  # raw uint16, as the examples of the project


if __name__ == "__main__":
    main(Path(sys.argv[1]))
