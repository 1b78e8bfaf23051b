"""The module in which a script first computes otherwise than with DDP."""

from collections.abc import Iterator

from ..evidence import Evidence
from ..tolerances import SAME_OUTPUT
from ..trace import difference
from ..trace.events import Layer, Place
from ..trace.sketches import Sketch


def first_layer(evidence: Evidence) -> tuple[str, Place | None] | None:
    """The first module, in the order in which the calls end, whose output is not that of DDP on the
    same rank: in words, its line.
    """
    run, oracle = evidence.layers, evidence.layers_reference
    if run is None or oracle is None:
        return None
    for mine, theirs in zip(run.traces, oracle.traces, strict=False):
        for layer, other in _pairs(mine.of(Layer), theirs.of(Layer)):
            if layer.made is not None and other.made is not None and _apart(layer.made, other.made):
                known = layer.given is not None and other.given is not None
                same = known and not _apart(layer.given or [], other.given or [])
                how = (
                    ", from equal inputs"
                    if same
                    else "; its inputs are not, either"
                    if known
                    else ""
                )
                text = (
                    f"`{layer.name}` ({layer.cls}) is the first module whose output is not that of"
                    f" DDP{how}"
                )
                return text, _forward(layer.name, mine.of(Layer))
    return None


def _pairs(mine: list[Layer], theirs: list[Layer]) -> Iterator[tuple[Layer, Layer]]:
    others = {layer.name: layer for layer in theirs}
    return ((layer, others[layer.name]) for layer in mine if layer.name in others)


def _forward(name: str, layers: list[Layer]) -> Place | None:
    """The forward of a module's class, or of that of the module around it which is the
    project's.
    """
    lines = {layer.name: layer.forward for layer in layers}
    while name and lines.get(name) is None:
        name = name.rpartition(".")[0]
    line = lines.get(name)
    return (
        None
        if line is None
        else Place(file=line.file, line=line.line, function=line.function, code=line.code)
    )


def _apart(a: Sketch, b: Sketch) -> bool:
    size = max(a[0], b[0]) ** 0.5
    return not difference(a, b) <= SAME_OUTPUT * size
