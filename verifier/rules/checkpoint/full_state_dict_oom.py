from collections.abc import Iterator

from ...analysis.checkpoints import unseen_save
from ...analysis.presence import absent, unfinished
from ...analysis.saves import all_saves
from ...evidence import Evidence
from ...finding import Finding, Hit
from ...source.events import Event, Flow
from ...source.looks import is_const, text
from ...source.looks_checkpoint import GETTERS, has_option, options_of
from ...source.registry import detector
from ...trace import Run
from ...trace.events import Template
from ..base import Rule


class FullStateDictOom(Rule):
    """A full state dict is made in the memory of the rank that writes it, and of no other.

    Why: `full_state_dict=True` without `cpu_offload=True` gives every rank the whole model, on its device: what FSDP was
    used to avoid. With both, rank 0 alone gets it, in CPU memory.
    Wrong:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Right:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Fix: Add `cpu_offload=True`, or save through DCP.
    Source: verl-project/verl#1517, PR#1667; meta-pytorch/torchtune PR#1495; axolotl PR#1828; pytorch#142355.
    Torch: run on 2.13.0: 16 keys on each of 2 ranks; with `cpu_offload`, 16 and 0.
    """

    wants = "run"

    def applies(self, evidence: Evidence) -> str:
        run = evidence.trained
        if reason := super().applies(evidence):
            return reason
        if run.world_size == 1:
            return "one rank holds the whole state"
        return "" if unseen_save(evidence) else absent(run, _written(run), "no full state dict is written to a file")

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        writers = {save.rank for save in all_saves(run) if save.op == "torch.save" and save.to}
        full = _written(run)
        if not full:
            return self.unknown(unfinished(run) or "no full state dict was seen")
        idle = [(rank, record) for rank, record in full if not record.offload and record.bytes]
        waste = [(rank, record) for rank, record in idle if rank not in writers]
        if len(writers) == 1 and waste:
            rank, record = max(waste, key=lambda item: int(item[1].bytes))
            return self.failed(
                f"only rank {min(writers)} writes, but rank {rank} too gets the whole state: {record.bytes:,} bytes "
                f"on each of {run.world_size} ranks",
                record.at_line,
            )
        return self.passed("no rank gets a full state dict that it does not write")


def _written(run: Run) -> list[tuple[int, Template]]:
    """The full state dicts that ranks make at a step at which a file is saved."""
    steps = {save.after + 1 for save in all_saves(run) if save.op == "torch.save"}
    made = [(trace.rank, record) for trace in run.traces for record in trace.of(Template)]
    return [(rank, record) for rank, record in made if record.full and record.step in steps]


def _may_have(options: Event, name: str) -> bool:
    given = options.kwargs.get(name)
    return options.open or bool(options.args) or (given is not None and not is_const(given, False))


@detector("full-state-dict-oom")
def full_state_dict_oom(flow: Flow) -> Iterator[Hit]:
    for event in flow.ops(*GETTERS):
        options = options_of(event)
        if options is not None and has_option(options, "full_state_dict") and not _may_have(options, "cpu_offload"):
            told = f"{text(event.node)} gathers the whole model on every rank's device: cpu_offload is not set"
            yield flow.hit("full-state-dict-oom", told, event)
