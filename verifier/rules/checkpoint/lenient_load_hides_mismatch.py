from ...analysis.checkpoints import only_exports
from ...source.flow_queries import SETTERS, is_const, made_by, names_in, options_of, text
from ...trace.events import Lenient
from ..base import Evidence, Finding, Flow, Hits, Rule, Run, count, some
from ..policies import JudgesExports
from ._resumed import NEEDS, first_steps, not_resumed, not_shown

# Parts of names that wrappers add (DDP, torch.compile, checkpoint_wrapper, FSDP1, `model`/`net`
# attributes): without them both names are one parameter (faults lenient_load_hides_mismatch*.yaml;
# exam round 5 p_08_teacher_prefix (missed)).
_WRAPPERS = (
    "module",
    "_orig_mod",
    "model",
    "_checkpoint_wrapped_module",
    "_fsdp_wrapped_module",
    "state_dict",
    "net",
)


class LenientLoadHidesMismatch(Rule):
    """A load that allows missing keys finds every parameter that the checkpoint has.

    Why: `allow_partial_load=True` and `strict=False` ignore missing keys. With one prefix too many
    on either side nothing is loaded, the model keeps its weights, and torch prints nothing.
    Wrong:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        state = {"module": get_model_state_dict(model)}  # another prefix than the checkpoint's
        dcp.load(state, checkpoint_id=path, planner=DefaultLoadPlanner(allow_partial_load=True))
    Right:
        dcp.save({"model": get_model_state_dict(model)}, checkpoint_id=path)
        state = {"model": get_model_state_dict(model)}
        dcp.load(state, checkpoint_id=path)
    Fix: Load strictly with the same keys as at the save; where keys may be missing, list them and
    check that list.
    Source: measured on `DefaultLoadPlanner` and `StateDictOptions(strict=False)`; pytorch#192224,
    #192202.
    """

    wants = "run"
    needs = NEEDS
    policies = (JudgesExports(),)

    def applies(self, evidence: Evidence) -> str:
        seen = any(_lenient(run) for run in (evidence.train, evidence.resume))
        exports = "" if seen else only_exports(evidence)
        return (
            super().applies(evidence)
            or exports
            or not_resumed(evidence, seen, "no load allows missing keys")
        )

    def unseen(self, evidence: Evidence) -> str:
        return "" if _lenient(evidence.train) else super().unseen(evidence)

    def judge(self, evidence: Evidence) -> Finding:
        loads = 0
        for run in (evidence.trained, evidence.resume):
            for record in _lenient(run):
                loads += 1
                pairs = _same_but_for_a_wrapper(record.names, record.unused)
                # No key at all found although the file has some: names of another kind. A file that
                # lacks some keys (a new head) may be meant (fault
                # lenient_load_hides_mismatch.yaml).
                nothing = 0 < record.wanted == record.missing_count and record.unused_count > 0
                lost = (
                    _not_back(evidence, [*record.missing, *(a for a, _ in pairs)])
                    # In a run from scratch missing keys may be meant (pretrained weights without a
                    # head); in a resume what was saved must come back (zoo/lora_adapters.py).
                    if run is evidence.resume
                    else []
                )
                if not lost and (run is evidence.resume or not (pairs or nothing)):
                    continue
                if pairs:
                    how = f"the load asks for `{pairs[0][0]}`, the checkpoint has `{pairs[0][1]}`"
                elif nothing:
                    how = (
                        f"the load asks for `{record.missing[0]}`, the checkpoint has"
                        f" `{record.unused[0]}`"
                    )
                else:
                    how = f"{some(lost)} came back with other values than were saved"
                what = (
                    f"{len(pairs) or record.missing_count} of {record.wanted} keys were not found"
                )
                return self.failed(f"{what}, which {record.how} allows: {how}", record.at_line)
        if not loads or (super().unseen(evidence) and evidence.resume is None):
            return self.unknown(super().unseen(evidence) or not_shown(evidence))
        return self.passed(
            f"{count(loads, 'load')} with missing keys allowed; no saved parameter was missed"
        )

    def detect(self, flow: Flow) -> Hits:
        if flow.methods("requires_grad_") or names_in(
            # Scripts that train a part of a model load leniently on purpose: what the base file
            # lacks is the adapters (zoo/lora_adapters.py).
            flow,
            "peft",
            "lora",
            "LoRA",
            "adapter",
            ".requires_grad =",
        ):
            return
        for event in flow.ops("dcp.load"):
            planner = made_by(event.kwargs.get("planner"), "dcp.DefaultLoadPlanner")
            if planner is not None and is_const(planner.kwargs.get("allow_partial_load"), True):
                yield (
                    (
                        "allow_partial_load: keys that the checkpoint lacks silently keep their"
                        " initial values"
                    ),
                    planner,
                )
        for event in flow.ops(*SETTERS[:2]):
            options = options_of(event)
            if (
                options is not None
                and is_const(options.kwargs.get("strict"), False)
                and event.discarded
            ):
                yield (
                    (
                        f"{text(event.node)} is not strict, and the missing keys that it returns"
                        " are not checked"
                    ),
                    event,
                )


def _lenient(run: Run | None) -> list[Lenient]:
    return run.traces[0].of(Lenient) if run is not None and run.traces else []


def _same_but_for_a_wrapper(asked: list[str], unused: list[str]) -> list[tuple[str, str]]:
    """Pairs of keys that are one name with another wrapper's prefix, or with one part more:
    `qkv.base.weight` of `qkv.weight`.
    """
    there = {_bare(key): key for key in unused}
    pairs = [(key, there[bare]) for key in asked if (bare := _bare(key)) in there]
    known = {key for key, _ in pairs}
    return pairs + [
        (key, shorter)
        for key in asked
        if key not in known
        for shorter in unused
        if _one_part_more(key, shorter)
    ]


def _one_part_more(key: str, shorter: str) -> bool:
    parts, others = key.split("."), shorter.split(".")
    # Adapters move a layer's weight to `qkv.base.weight`: pretrained names with one part less are
    # the same parameters, which stay at their initial values (exam round 7
    # fa_02_lora_pretrained_base (missed)).
    return len(parts) == len(others) + 1 and any(
        parts[:i] + parts[i + 1 :] == others for i in range(len(parts))
    )


def _bare(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in _WRAPPERS)


def _not_back(evidence: Evidence, missing: list[str]) -> list[str]:
    """Parameters of a resumed model that a lenient load did not find and that are not as they were
    saved.
    """
    pair = first_steps(evidence)
    if isinstance(pair, str):
        return []
    names = {
        n for s, r in zip(*pair, strict=True) for n in s.weights if s.weights[n] != r.weights.get(n)
    }
    return sorted(n for n in names if any(key == n or key.endswith("." + n) for key in missing))
