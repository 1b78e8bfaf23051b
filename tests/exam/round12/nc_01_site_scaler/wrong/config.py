from dataclasses import dataclass


@dataclass
class Config:
    """Surrogate of a chiller plant model, one table of runs per site."""

    sites: int = 8
    rows_per_site: int = 96
    features: int = 6
    hidden: int = 32
    depth: int = 2
    rows_per_step: int = 4  # from every site
    steps: int = 40
    lr: float = 4e-3
    seed: int = 11
