"""torchrun --nproc-per-node 4 train.py configs/base.yaml out=runs/base [key=value ...]"""

import sys

from glossa import comm, config
from glossa.settings import Settings
from glossa.training import Training


def main() -> None:
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    settings = config.read(Settings, sys.argv[1], sys.argv[2:])
    comm.start()
    training = Training(settings)
    if settings.resume:
        training.resume(settings.resume)
    training.run()
    comm.stop()


if __name__ == "__main__":
    main()
