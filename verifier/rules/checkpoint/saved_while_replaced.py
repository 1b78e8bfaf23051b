from ...trace.events import Place, Saving, Step
from ..base import Evidence, Finding, count, some
from ._resumed import ResumeRule, load_line


class SavedWhileReplaced(ResumeRule):
    """A checkpoint holds the weights that training goes on with.

    Why: An evaluation on averaged weights puts them into the model and takes them out again. A save
    in between, such as that of a callback that runs first, stores them as the model. The
    uninterrupted run is right; a resumed one trains on from other weights, with the optimizer state
    of the first.
    Wrong:
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(average)
        value = evaluate(model)
        # the average, saved as the model
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
        model.load_state_dict(trained)
    Right:
        trained = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        model.load_state_dict(average)
        value = evaluate(model)
        model.load_state_dict(trained)
        dcp.save({"model": model.state_dict()}, checkpoint_id=path)
    Fix: Save before other weights are put into the model, or after the training weights are back.
    Source: atomistic-machine-learning/schnetpack PR#785; law L6; in scripts of others three times
    (a save in the swap, callbacks in the wrong order).
    """

    def compare(self, evidence: Evidence, saved: list[Step], resumed: list[Step]) -> Finding:
        names, line = replaced(evidence, saved, resumed)
        if not names:
            return self.passed(
                f"{count(len(saved[0].weights), 'parameter')} saved as training goes on with them"
            )
        which = f"{len(names)} of {len(saved[0].weights)} parameters ({some(sorted(names))})"
        what = (
            f"the save after step {saved[0].step - 1} holds other values of {which} than training"
            " went on with"
        )
        inside, own = next(((i, o) for i, o in names.values() if o), next(iter(names.values())))
        same = f"; the save has the same values as {some(inside)}" if len(inside) > 1 else ""
        where = f"; those of the training are there as {some(own)}" if own else ""
        return self.failed(
            f"{what}, and the resumed run starts from these{where or same}",
            line or load_line(evidence),
        )


def replaced(
    evidence: Evidence, saved: list[Step], resumed: list[Step]
) -> tuple[dict[str, tuple[list[str], list[str]]], Place | None]:
    """{a parameter of which the save has other values than training went on with: their keys, the
    keys of the right values}, saving line.

    These are the values that the model had when it was saved and that the resumed run starts with.
    """
    names: dict[str, tuple[list[str], list[str]]] = {}
    line = None
    for trace, before, after in zip(evidence.trained.traces, saved, resumed, strict=True):
        for save in (s for s in trace.of(Saving) if s.after_step == before.step - 1):
            for name, held in save.weights.items():
                right = before.weights.get(name)
                # The model held these values during the save, the resumed run begins with them, and
                # the training went on with others: all three must hold (fault
                # saved_while_replaced.yaml; 'in scripts of others three times').
                if held == after.weights.get(name) != right:
                    keys = [
                        [key for key, one in save.entries.items() if one.sketch == value]
                        for value in (held, right)
                    ]
                    names[name], line = (keys[0], keys[1]), save.at_line
    return names, line
