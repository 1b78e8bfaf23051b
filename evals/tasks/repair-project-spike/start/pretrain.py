"""torchrun --nproc-per-node 4 pretrain.py configs/tiles.yaml out=runs/tiles [key=value ...]"""

import sys

from tiles import comm, config
from tiles.pretraining import Pretraining
from tiles.settings import Settings

if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[1], sys.argv[2:])
    comm.start()
    pretraining = Pretraining(settings)
    if settings.resume:
        pretraining.resume(settings.resume)
    pretraining.run()
    comm.stop()
