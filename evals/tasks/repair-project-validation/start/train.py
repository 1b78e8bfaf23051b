"""torchrun --nproc-per-node 4 train.py configs/base.yaml out=runs/base [key=value ...]"""

import sys

from atlas import comm, config
from atlas.settings import Settings
from atlas.trainer import Trainer


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    try:
        settings = config.read(Settings, sys.argv[1], sys.argv[2:])
    except config.ConfigError as error:
        raise SystemExit(f"settings: {error}") from None
    comm.start()
    trainer = Trainer(settings)
    if settings.resume:
        trainer.resume(settings.resume)
    trainer.fit()
    comm.stop()


if __name__ == "__main__":
    main()
