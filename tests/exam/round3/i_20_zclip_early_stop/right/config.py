import argparse
import dataclasses
import json
from dataclasses import dataclass


@dataclass
class Config:
    steps: int = 30
    batch: int = 40
    lr: float = 0.08
    z_limit: float = 2.0
    warmup: int = 5
    patience: int = 8
    check_every: int = 3
    save_every: int = 0
    out: str = ""
    resume: str = ""

    TRANSIENT = ("steps", "save_every", "out", "resume")

    @classmethod
    def from_args(cls):
        ap = argparse.ArgumentParser()
        for f in dataclasses.fields(cls):
            ap.add_argument("--" + f.name.replace("_", "-"), type=f.type, default=f.default)
        return cls(**vars(ap.parse_args()))

    def identity(self):
        """What must not change between the runs of one training."""
        return json.dumps(
            {k: v for k, v in dataclasses.asdict(self).items() if k not in self.TRANSIENT}, sort_keys=True
        )
