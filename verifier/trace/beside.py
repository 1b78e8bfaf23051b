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
    # One step of each other optimizer behind the last one is the rest of that iteration (a GAN)
    # (test_steps_behind_the_last_one_of_the_first_optimizer).
    before = Counter(dict.fromkeys(last, 1))
    for (span, optimizer), number in counts.items():
        before[optimizer] = max(before[optimizer], number if span < len(begins) else 0)
    # The first optimizer ends before the others (exam round 11 mb_11, me_10): later steps are of no
    # step of the run (exam r11 mb_11_forward_forward, me_10_two_phase_distill).
    return len(begins) > 1 and any(number > before[optimizer] for optimizer, number in last.items())


def beside(record: Step, others: list[Step]) -> Step:
    """A step's record with the state of the other optimizers in the step, and the gradients of
    their own parameters.
    """
    first: dict[int, Step] = {}
    for other in others:
        # Of several steps of a second optimizer (a critic) the first has the gradients of this
        # iteration's weights.
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
        # Each optimizer's changes are those of its own parameters: what else moved is another's
        # record.
        own = set(held.get(other.optimizer, ()))
        weights, moved = (
            {k: v for k, v in found.items() if k in own} for found in (other.weights, other.moved)
        )
        record = replace(
            record, weights={**record.weights, **weights}, moved={**record.moved, **moved}
        )
    return record
