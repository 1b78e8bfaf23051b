from ...analysis.applicability import absent, unfinished
from ...analysis.checkpoints import unseen_save
from ...analysis.saves import all_saves
from ...source.flow_queries import GETTERS, has_option, is_const, options_of, text
from ...trace.events import Template
from ..base import Event, Evidence, Finding, Flow, Hits, Rule, Run
from ..policies import JudgesExports, OnlyWarns


class FullStateDictOom(Rule):
    """Only the rank that writes a full state dict holds it, in CPU memory.

    Why: `full_state_dict=True` without `cpu_offload=True` gives every rank the whole model, on its
    device: what FSDP was used to avoid. With both, only rank 0 gets it, in CPU memory.
    Wrong:
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
        if dist.get_rank() == 0:
            torch.save(state, path)
    Right:
        options = StateDictOptions(full_state_dict=True, cpu_offload=True)
        state = get_model_state_dict(model, options=options)
        if dist.get_rank() == 0:
            torch.save(state, path)
    Fix: Add `cpu_offload=True`, or save through DCP.
    Source: verl-project/verl#1517, PR#1667; meta-pytorch/torchtune PR#1495; axolotl PR#1828;
    pytorch#142355.
    Torch: run on 2.13.0: 16 keys on each of 2 ranks; with `cpu_offload`, 16 and 0.
    """

    # A full state dict on every rank costs memory only: the trained model is right, so it warns
    # (exam round 6 t_17, w_08 twin, w_11, w_20 (4 false alarms)).
    policies = (JudgesExports(), OnlyWarns())
    wants = "run"
    one_rank = "it holds the full state dict"

    def applies(self, evidence: Evidence) -> str:
        if (reason := super().applies(evidence)) or unseen_save(evidence):
            return reason
        return absent(
            evidence.trained,
            _written(evidence.trained),
            "the script writes no full state dict to a file",
        )

    def judge(self, evidence: Evidence) -> Finding:
        run = evidence.trained
        writers = {save.rank for save in all_saves(run) if save.op == "torch.save" and save.to}
        full = _written(run)
        if not full:
            return self.unknown(unfinished(run) or "no full state dict was recorded")
        waste = [
            (r.bytes, rank, r)
            for rank, r in full
            # With cpu_offload torch gives the full state dict to rank 0 alone: the others hold
            # nothing (zoo/checkpoint_full_state.py).
            if not r.offload and r.bytes and rank not in writers
        ]
        # If several ranks write files each may need what it holds; only a single writer makes the
        # other copies waste (zoo/checkpoint_per_rank_files.py).
        if len(writers) == 1 and waste:
            size, rank, record = max(waste, key=lambda item: item[0])
            what = (
                f"rank {rank} holds the full state dict, {size:,} bytes, but only rank"
                f" {min(writers)} writes it"
            )
            return self.failed(f"{what} ({run.world_size} ranks)", record.at_line)
        return self.passed("every rank that holds a full state dict writes it")

    def detect(self, flow: Flow) -> Hits:
        for event in flow.ops(*GETTERS):
            options = options_of(event)
            if (
                options is not None
                and has_option(options, "full_state_dict")
                and not _may_have(options, "cpu_offload")
            ):
                yield (
                    (
                        f"{text(event.node)} without cpu_offload gathers the whole model on every"
                        " rank's device"
                    ),
                    event,
                )


def _written(run: Run) -> list[tuple[int, Template]]:
    """The full state dicts that ranks make at a step at which a file is saved."""
    steps = {save.after + 1 for save in all_saves(run) if save.op == "torch.save"}
    return [(t.rank, r) for t in run.traces for r in t.of(Template) if r.full and r.step in steps]


def _may_have(options: Event, name: str) -> bool:
    given = options.kwargs.get(name)
    # An option that is passed on by ** or by position may be cpu_offload: the sources do not say,
    # so nothing is reported.
    return options.open or bool(options.args) or (given is not None and not is_const(given, False))
