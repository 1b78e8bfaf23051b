"""torchvision's wheel of PyPI is one for CUDA: beside the CPU build of torch its library cannot be
loaded, and its import stops for want of operators. `main` writes a `sitecustomize` that declares
them as soon as torchvision is imported.
"""

import runpy
from pathlib import Path

SITE = """\
import importlib.abc
import sys


class Declare(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "torchvision":
            sys.meta_path.remove(self)
            import torch

            for operator in ("nms", "qnms"):
                torch.library.define(
                    f"torchvision::{operator}",
                    "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
                )


sys.meta_path.insert(0, Declare())
"""


def main(folder: Path) -> None:
    """Write `folder`/site, a folder for PYTHONPATH, and import torchvision as it does from now
    on.
    """
    (folder / "site").mkdir(exist_ok=True)
    file = folder / "site" / "sitecustomize.py"
    file.write_text(SITE, encoding="utf-8")
    runpy.run_path(str(file))
