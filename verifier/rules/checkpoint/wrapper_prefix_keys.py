import ast
import re
from dataclasses import dataclass

from ...analysis.root_cause import root_cause
from ...analysis.saves import Save, all_saves
from ...analysis.syntax import last_name
from ...evidence import Sources
from ...source.flow_queries import SAVES, names_in, text
from ...source.values import reach
from ..base import Evidence, Finding, Flow, Hits, Run, count, some
from ._saved import SaveRule, parameter_of

# Parts that torch.compile, checkpoint_wrapper and DDP put before parameter names (fault
# wrapper_prefix_keys.yaml).
PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "module")
# Methods by which a script takes `module.` off the keys itself when it loads: then the prefix in
# the file does no harm (exam round 4 k_07_distil_teacher twin).
_TAKE_OFF = ("removeprefix", "replace", "startswith", "split", "partition", "sub")

_MISSING = re.compile(r"Missing key in checkpoint state_dict: (?P<key>[^\s{}]+)")


class WrapperPrefixKeys(SaveRule):
    """The keys of a checkpoint are the parameter names of the model, without wrapper prefixes.

    Why: `torch.compile`, activation checkpointing and DDP-like wrappers put `_orig_mod`,
    `_checkpoint_wrapped_module` or `module` into the names. A checkpoint with such keys loads only
    into a model that is wrapped in the same order.
    Wrong:
        model = torch.compile(model, backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Right:
        model.compile(backend="eager")
        torch.save({name: p.full_tensor() for name, p in model.named_parameters()}, path)
    Fix: Save `get_model_state_dict(model)`, whose keys have no prefixes; compile in place
    (`model.compile()`).
    Source: pytorch/torchtitan#2622; pytorch-image-models PR#2003; mosaicml/composer PR#2745;
    pytorch#124546.
    """

    kind = "save of a tensor"
    reads = frozenset({"resume"})
    explains = ("missing-optim-state-for-unused-param", "resume-is-exact", "run-completes")

    def judge(self, evidence: Evidence) -> Finding:
        if (refused := self._refused(evidence)) is not None:
            return refused
        found = super().judge(evidence)
        saves = [save for save in all_saves(evidence.trained) if self.about(save)]
        first = _first_prefixed(evidence.trained, saves)
        if first is not None and _takes_off(evidence.sources, first.prefix):
            # exam round 4: a right trainer whose loader strips `module.` itself
            return self.passed(
                f"`{first.prefix}` is in keys of a save, and the script takes it off"
            )
        return found

    def _refused(self, evidence: Evidence) -> Finding | None:
        """A resume that found no key, where the saved one differs by a prefix alone (nanotron's
        optimizer state under the names of the wrapped model).
        """
        resume = evidence.resume
        if resume is None or resume.completed:
            return None
        cause = root_cause(resume)
        missing = _MISSING.search(cause.error)
        if missing is None:
            return None
        asked = missing["key"].rstrip(".")
        keys = {key for save in all_saves(evidence.trained) for key in save.entries}
        saved = min((key for key in keys if _plain(key) == _plain(asked)), default=asked)
        if saved == asked:
            return None
        return self.failed(
            f"the resume asks for `{asked}`, and the checkpoint has it as `{saved}`",
            cause.location,
            fix="Save and load by the names of the same model, wrapped or not:"
            " `get_model_state_dict` and `get_optimizer_state_dict` leave the prefixes out.",
        )

    def check(self, run: Run, saves: list[Save]) -> Finding:
        first = _first_prefixed(run, saves)
        if first is None:
            return self.passed("no key contains a wrapper prefix")
        of_all = f"{len(first.keys)} of {count(first.tensors, 'key')} of the checkpoint"
        text = f"`{first.prefix}` is in {of_all}: {some(first.keys, 1)}"
        return self.failed(text, first.save.line)

    def detect(self, flow: Flow) -> Hits:
        """State that is saved through the compiled model and loaded into the plain one."""
        # A script that names `_orig_mod` knows of it: it saves or loads through the inner module.
        if names_in(flow, "_orig_mod"):
            return
        compiled = {id(e.result): e for e in flow.ops("torch.compile") if e.args}
        loads = [e.on for e in flow.methods("load_state_dict") if e.on is not None]
        if any(id(model) in compiled for model in loads):
            return
        for event in flow.ops("torch.save", *SAVES):
            for part in reach(event.args[0]) if event.args else ():
                made = part.event if part.kind == "made" and part.name == "state_dict" else None
                wrapped = compiled.get(id(made.on)) if made is not None else None
                if (
                    made is not None
                    and wrapped is not None
                    and any(model is wrapped.args[0] for model in loads)
                ):
                    yield (
                        (
                            f"{text(made.node)} has `_orig_mod.` keys and is loaded into the model"
                            " before compile"
                        ),
                        made,
                    )
                    break


@dataclass(frozen=True)
class _Prefixed:
    """The keys of a save that contain a wrapper's prefix."""

    save: Save
    prefix: str
    keys: list[str]
    tensors: int


def _first_prefixed(run: Run, saves: list[Save]) -> _Prefixed | None:
    """The first save with such keys, and the first prefix in them."""
    for save in saves:
        tensors = [key for key, entry in save.entries.items() if entry.kind != "object"]
        for prefix in PREFIXES[:2]:
            if keys := [key for key in tensors if prefix in key.split(".")]:
                return _Prefixed(save, prefix, keys, len(tensors))
        wrapped = [key for key in tensors if _of_a_wrapper(run, key)]
        clean = any(parameter_of(run, key) and key not in wrapped for key in tensors)
        # `module.` is what torch's own AveragedModel writes, beside its count `n_averaged`
        averaged = any(key.endswith("n_averaged") for key in tensors)
        if wrapped and not clean and not averaged:
            return _Prefixed(save, "module", wrapped, len(tensors))
    return None


def _of_a_wrapper(run: Run, key: str) -> bool:
    """Whether a key is `module.` before the name of a parameter."""
    head, found, _ = key.partition("module.")
    return bool(found) and head[-1:] in ("", ".") and key.rpartition("module.")[2] in run.parameters


def _plain(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in PREFIXES)


def _takes_off(sources: Sources, prefix: str) -> bool:
    """Whether the project has a call that takes a prefix off a key, or asks for it."""
    calls = (
        n
        for file in sources.project
        for n in ast.walk(sources.tree(file))
        if isinstance(n, ast.Call)
    )
    given = (one for call in calls if last_name(call.func) in _TAKE_OFF for one in call.args)
    return any(isinstance(one, ast.Constant) and f"{prefix}." in str(one.value) for one in given)
