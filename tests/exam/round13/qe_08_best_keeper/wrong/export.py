import pathlib

import numpy as np
import torch.distributed as dist
from torch.distributed.tensor import DTensor


def export_npz(model, path, **notes):
    """Whole weights in one archive for the serving side."""
    arrays = {}
    for name, p in model.named_parameters():
        p = p.detach()
        arrays[name] = (p.full_tensor() if isinstance(p, DTensor) else p).numpy()
    if dist.get_rank() == 0:
        pathlib.Path(path).parent.mkdir(parents=True, exist_ok=True)
        np.savez(path, **arrays, **notes)
