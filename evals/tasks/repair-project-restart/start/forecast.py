"""torchrun --nproc-per-node 2 forecast.py configs/tides.yaml out=runs/tides [key=value ...]"""

import sys

from tides import comm, config, loop
from tides.settings import Settings


def main(path: str, *words: str) -> None:
    settings = config.read(Settings, path, list(words))
    comm.start()
    try:
        run = loop.prepare(settings)
        if settings.resume:
            loop.go_on(run, settings.resume)
        loop.train(run)
        loop.deliver(run)
    finally:
        comm.stop()


if __name__ == "__main__":
    if len(sys.argv) < 2:
        raise SystemExit(__doc__)
    main(*sys.argv[1:])
