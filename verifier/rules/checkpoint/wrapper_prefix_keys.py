import ast

from ...analysis.saves import Save
from ...analysis.syntax import last_name
from ...evidence import Sources
from ...source.flow_queries import SAVES, names_in, text
from ...source.values import reach
from ..base import Evidence, Finding, Flow, Hits, Run, count, some
from ._saved import SaveRule, parameter_of

PREFIXES = ("_orig_mod", "_checkpoint_wrapped_module", "module")
_TAKE_OFF = ("removeprefix", "replace", "startswith", "split", "partition", "sub")


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

    def judge(self, evidence: Evidence) -> Finding:
        found = super().judge(evidence)
        taken = [
            prefix
            for prefix in PREFIXES
            if f"`{prefix}`" in found.evidence and _takes_off(evidence.sources, prefix)
        ]
        if found.status == "fail" and taken:
            return self.passed(f"`{taken[0]}` is in keys of a save, and the script takes it off")
        return found

    def check(self, run: Run, saves: list[Save]) -> Finding:
        for save in saves:
            tensors = [key for key, entry in save.entries.items() if entry.kind != "object"]
            prefixed = {
                prefix: [key for key in tensors if prefix in key.split(".")]
                for prefix in PREFIXES[:2]
            }
            wrapped = [
                key
                for key in tensors
                if _module_prefix(key) and key.rpartition("module.")[2] in run.parameters
            ]
            clean = any(parameter_of(run, key) and key not in wrapped for key in tensors)
            if not clean and not any(key.endswith("n_averaged") for key in tensors):
                prefixed["module"] = wrapped
            for prefix, keys in prefixed.items():
                if keys:
                    of_all = f"{len(keys)} of {count(len(tensors), 'key')} of the checkpoint"
                    return self.failed(f"`{prefix}` is in {of_all}: {some(keys, 1)}", save.line)
        return self.passed("no key contains a wrapper prefix")

    def detect(self, flow: Flow) -> Hits:
        """State that is saved through the compiled model and loaded into the plain one."""
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


def _module_prefix(key: str) -> bool:
    head, found, _ = key.partition("module.")
    return bool(found) and (not head or head.endswith("."))
