"""Several optimizers in one training: the steps of the first one are those of the run, and the
others' belong to them.
"""

from bisect import bisect
from collections import Counter
from dataclasses import replace

from .events import Step, Stepped


def others_go_on(steps: list[Step]) -> bool:
    """Whether another optimizer steps more often behind the last step of the first one than between
    two of them: its time is over.
    """
    first = steps[0].optimizer if steps else None
    begins = [r.seq for r in steps if r.optimizer == first]
    counts = Counter((bisect(begins, r.seq), r.optimizer) for r in steps if r.optimizer != first)
    last = {
        optimizer: number for (span, optimizer), number in counts.items() if span == len(begins)
    }
    before = Counter(dict.fromkeys(last, 1))
    for (span, optimizer), number in counts.items():
        before[optimizer] = max(before[optimizer], number if span < len(begins) else 0)
    return len(begins) > 1 and any(number > before[optimizer] for optimizer, number in last.items())


def beside(record: Step, others: list[Step]) -> Step:
    """A step's record with the state of the other optimizers in the step, and the gradients of
    their own parameters.
    """
    first: dict[int, Step] = {}
    for other in others:
        first.setdefault(other.optimizer, other)
    for other in first.values():
        gradients = (other.grads_at_step, other.grads)
        own, before = (
            {n: value for n, value in found.items() if n in other.held} for found in gradients
        )
        record = replace(
            record,
            held=[*record.held, *(name for name in other.held if name not in record.held)],
            strangers=[
                *record.strangers,
                *(shape for shape in other.strangers if shape not in record.strangers),
            ],
            lr=[*record.lr, *other.lr],
            state={**other.state, **record.state},
            grads={**record.grads, **before},
            grads_at_step={**record.grads_at_step, **own},
        )
    return record


def changed_beside(record: Stepped, others: list[Stepped], held: dict[int, list[str]]) -> Stepped:
    """The record of a step's changes, with those that the other optimizers made to their own
    parameters.
    """
    for other in others:
        own = set(held.get(other.optimizer, ()))
        weights, moved = (
            {k: v for k, v in found.items() if k in own} for found in (other.weights, other.moved)
        )
        record = replace(
            record, weights={**record.weights, **weights}, moved={**record.moved, **moved}
        )
    return record
