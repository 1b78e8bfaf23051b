from pathlib import Path

from ...analysis.checkpoints import unseen_save
from ...trace.events import Checkpoint, WrittenFile
from ..base import Evidence, Finding, Rule, Run, count


class ExportWithoutTensors(Rule):
    """A file that is written for a trained model holds tensors.

    Seen: an exported file of a few hundred bytes; whoever loads it without `strict` has the base
    model
    Why: an export chooses by name what it writes. Where no name matches, because the file's names
    lack what wrapping or the adapter's name adds, it writes an empty mapping, and nothing fails.
    Wrong:
        keys = [name.replace("blocks", "layers") for name, _ in model.named_parameters()]
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        chosen = {name: full[name] for name in full if name in keys and "blocks" in name}
        torch.save(chosen, path)
    Right:
        keys = [name for name, _ in model.named_parameters()]
        full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        chosen = {name: full[name] for name in full if name in keys and "blocks" in name}
        if dist.get_rank() == 0:
            torch.save(chosen, path)
    Fix: Choose by the names that the model's state dict has, and raise if an expected name is not
    among them.
    Source: X-GenGroup/Flow-Factory PR#156: `torch.save` or safetensors is given a mapping without
    any value, by a line that never writes a tensor; a warning if other files hold tensors.
    """

    reads = frozenset({"survey"})

    def applies(self, evidence: Evidence) -> str:
        seen = _run(evidence).all(WrittenFile) or unseen_save(evidence)
        return "" if seen else "no mapping is written with torch.save or safetensors"

    def unseen(self, evidence: Evidence) -> str:
        # The survey run sees what is written after the steps of the train run.
        return "" if _run(evidence).all(WrittenFile) else super().unseen(evidence)

    def judge(self, evidence: Evidence) -> Finding:
        run = _run(evidence)
        written = run.all(WrittenFile)
        full = [one for one in written if one.tensors]
        # Ranks other than 0 get an empty dict of a full state dict, and may write it: beside the
        # tensors of rank 0, or over them (which local-shard-export and the like find).
        lines, paths = {one.at_line for one in full}, {one.to for one in full}
        hollow = [
            one
            for one in written
            if one.after_step
            and not one.values
            and one.at_line not in lines
            and one.to not in paths
        ]
        if not hollow:
            return self.passed(
                f"{count(len(full), 'file')} with tensors, and none without any value"
            )
        first = hollow[0]
        text = (
            f"{Path(first.to).name}, written after step {first.after_step}, has no tensor and no"
            " other value (expected: tensors of the model)"
        )
        return self.failed(text, first.at_line, required=not full and not _saves(run))


def _run(evidence: Evidence) -> Run:
    return evidence.survey or evidence.trained


def _saves(run: Run) -> bool:
    """Whether the run makes a checkpoint with DCP."""
    return any(record.op in ("save", "async_save") for record in run.all(Checkpoint))
