"""A start of Lightning's tensor-parallel examples at a size that fits: their model has 7 billion
parameters and no option for it.

    python lightning.py FOLDER

FOLDER/small.py EXAMPLE changes the defaults of the example's own `ModelArgs`, then runs its
train.py as it is.
"""

import sys
from pathlib import Path

START = """\
import runpy
import sys

sys.path.insert(0, sys.argv[1])
import model

SIZES = {"dim": 32, "n_layers": 2, "n_heads": 4, "multiple_of": 32}
SIZES |= {"max_batch_size": 8, "max_seq_len": 256}
defaults = [
    SIZES.get(name, getattr(model.ModelArgs, name)) for name in model.ModelArgs.__dataclass_fields__
]
model.ModelArgs.__init__.__defaults__ = tuple(defaults)
example = sys.argv.pop(1)
runpy.run_path(f"{example}/train.py", run_name="__main__")
"""

if __name__ == "__main__":
    (Path(sys.argv[1]) / "small.py").write_text(START, encoding="utf-8")
