"""Which further runs the train run makes useful."""

from ..evidence import Evidence
from ..trace import Run
from ..trace.events import Clips, signature
from .scaling import clip_was_reached


def clip_is_open(evidence: Evidence) -> bool:
    """Whether the script may clip gradients that the train run did not make large enough: huge ones would show it."""
    train = evidence.train
    if train is None or train.steps() == 0 or clip_was_reached(train):
        return False
    return evidence.gradients or changes_gradients(train)


def changes_gradients(train: Run) -> bool:
    """Whether a clip was called, or gradients changed between backward and the optimizer step."""
    return bool(train.all(Clips)) or any(r.grads != r.grads_at_step for trace in train.traces for r in trace.steps)


def keeps_its_batch_on(ranks: int, train: Run) -> bool:
    """Whether this script keeps its global batch on `ranks` ranks, judged by its train run."""
    if any(len(e[0].mesh) > 1 for e in train.parameters.values()):
        return False
    batch, micros = train.global_batch(1).total(), train.micros(1)
    largest = max((len(m.rows) for rank in micros for m in rank), default=0)
    several = any(len(rank) > 1 for rank in micros)
    return batch > 0 and batch % (ranks * largest if several else ranks) == 0


def several_models(train: Run) -> dict[str, str]:
    """{prefix of the names of a model: its parameters and their shapes} of the train run, if it has several models."""
    found = {m.root: signature((p.name.removeprefix(m.root), p.shape) for p in m.parameters) for m in train.models}
    return found if len(found) > 1 else {}
