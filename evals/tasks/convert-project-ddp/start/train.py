"""torchrun --nproc-per-node 4 train.py configs/base.yaml out=runs/base [key=value ...]"""

import sys

from parley import comm, config
from parley.settings import Settings
from parley.trainer import Trainer


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[1], sys.argv[2:])
    comm.start()
    trainer = Trainer(settings)
    if settings.resume:
        trainer.resume(settings.resume)
    trainer.fit()
    comm.stop()


if __name__ == "__main__":
    main()
