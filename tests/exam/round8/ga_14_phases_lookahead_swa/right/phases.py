import dataclasses


@dataclasses.dataclass
class Phase:
    name: str
    steps: int
    lr: float
    train: tuple  # prefixes of the trained parameters
    swa: bool = False


PLAN = [
    Phase("decoder", 6, 2e-2, ("dec",)),
    Phase("all", 8, 1e-2, ("enc", "dec")),
    Phase("average", 8, 5e-3, ("enc", "dec"), swa=True),
]
