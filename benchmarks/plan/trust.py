"""How far `fsdp2 plan` can be trusted: its memory and its bound on speed beside figures that others
measured on GPUs and published.

`python benchmarks/plan/trust.py [NAME...]` tries the cases of published.yaml, prints a table
and writes benchmarks/results/plan.json, which has the newest of each. `--table` prints what is
there. No figure of a case is used to compute a prediction.
"""

import json
import shlex
import statistics
import sys
from pathlib import Path
from typing import Any

import yaml
from llama import SIZES, arguments

from capacity_runs import GIB, Seen, capacity_runs_of
from results_file import write
from verified_fsdp2.verifier.analysis.roofline import bound
from verified_fsdp2.verifier.config.devices import device

HERE = Path(__file__).parent
RESULT = HERE.parent / "results" / "plan.json"
Row = dict[str, Any]


def parameters(size: str) -> int:
    layers, width, heads, kv_heads, ffn, vocabulary = SIZES[size]
    attention = 2 * width * width + 2 * width * (width // heads) * kv_heads
    return layers * (attention + 3 * width * ffn + 2 * width) + (2 * vocabulary + 1) * width


def formulas(case: Row) -> dict[str, float]:
    """GiB of a rank by what is used otherwise: 16 bytes a parameter and activations as in arXiv
    2205.05198; accelerate estimate-memory.

    Activations of a layer: 34 bytes for each token and width (no dropout: 32), 2 with full
    checkpointing; logits in float32 twice. `accelerate estimate-memory` prints four times the
    float32 weights, of the whole model; here by ranks.
    """
    args = arguments(shlex.split(case["args"]))
    layers, width, *_, vocabulary = SIZES[args.size]
    count, tokens = parameters(args.size), args.batch * args.sequence
    kept = {"none": 34, "full": 2}.get(args.ac, 34)
    activations = layers * kept * tokens * width / args.tp + 8 * tokens * vocabulary / args.tp
    ranks = case["nproc"] / args.dp_replicate
    return {
        "formula": round((16 * count / ranks + activations) / GIB, 2),
        "accelerate": round(16 * count / ranks / GIB, 2),
    }


def predicted(seen: Seen, case: Row) -> Row:
    """What the plan says: GiB of the peaks, and the bound on speed."""
    if seen.record is None or seen.errors:
        return {"errors": list(seen.errors) or ["no record"], "seconds": round(seen.seconds, 1)}
    peaks = {peak.phase: peak for peak in seen.record.peaks}
    first, later = peaks["first step"], peaks.get("later steps", peaks["first step"])
    taken = "expandable" if case.get("allocator") == "expandable" else "reserved"
    at_most = bound(seen.record, device(case["gpu"]))
    tp = arguments(shlex.split(case["args"])).tp
    return {
        "active": round(later.bytes / GIB, 2),
        "reserved": round(getattr(later, taken) / GIB, 2),
        "first_reserved": round(getattr(first, taken) / GIB, 2),
        "kinds": {
            kind: round(size / GIB, 2) for kind, size in later.kinds.items() if size > GIB // 100
        },
        "tokens": round((at_most.tokens_per_second or 0.0) / tp, 1),
        "mfu": round(100 * at_most.mfu, 1) if at_most.mfu is not None else None,
        "step": round(at_most.step, 4),
        "eager": round((at_most.tokens_per_second or 0.0) * at_most.step / at_most.eager / tp, 1),
        "moved": round(at_most.moved, 4),
        "compute": round(at_most.compute, 4),
        "waited": round(at_most.waited, 4),
        "link": round(at_most.link, 4),
        "network": round(at_most.network, 4),
        "limited_by": at_most.limited_by,
        "seconds": round(seen.seconds, 1),
        "host_mib": seen.record.host_peak >> 20,
        **formulas(case),
    }


def compared(case: Row, plan: Row) -> Row:
    """Predicted / reported of each figure."""
    if "errors" in plan:
        return {}
    gib, first = case.get("gib", {}), case.get("first_gib", {})
    found = {kind: plan[kind] / gib[kind] for kind in ("active", "reserved") if kind in gib}
    found |= {"first_reserved": plan["first_reserved"] / first["reserved"]} if first else {}
    if case.get("tokens"):
        found |= {
            "tokens": plan["tokens"] / case["tokens"],
            "eager": plan["eager"] / case["tokens"],
        }
    if "reserved" in gib:
        found |= {name: plan[name] / gib["reserved"] for name in ("formula", "accelerate")}
    return {name: round(value, 3) for name, value in found.items()}


def table(cases: list[Row], kept: dict[str, Row]) -> str:
    lines = [
        f"{'case':30} {'reported':>16} {'predicted':>16} {'ratio':>12} {'tokens/s':>9}"
        f" {'at most':>9} {'ratio':>6}"
    ]
    for case in cases:
        plan = kept.get(case["name"])
        if plan is None:
            continue
        if "errors" in plan:
            lines.append(f"{case['name']:30} {plan['errors'][0][:90]}")
            continue
        ratio, gib = plan["ratio"], case.get("gib", {})
        kinds = [kind for kind in ("active", "reserved") if kind in gib]
        cells = [" / ".join(f"{one[kind]:.2f}" for kind in kinds) for one in (gib, plan, ratio)]
        speed = f"{case.get('tokens', 0):9.0f} {plan['tokens']:9.0f} {ratio.get('tokens', 0):6.2f}"
        compiled = "compiled" if case.get("compiled") else ""
        lines.append(
            f"{case['name']:30} {cells[0]:>16} {cells[1]:>16} {cells[2]:>12} {speed} {compiled}"
        )
    return "\n".join(lines)


def summary(cases: list[Row], kept: dict[str, Row]) -> Row:
    """Errors over the cases whose settings are known: eager, with the allocator's setting."""
    rows = [
        (case, kept[case["name"]]["ratio"])
        for case in cases
        if "ratio" in kept.get(case["name"], {})
    ]
    eager = [(case, ratio) for case, ratio in rows if not case.get("compiled")]

    def errors(name: str) -> list[float]:
        return [abs(ratio[name] - 1) for _, ratio in eager if name in ratio]

    found = {
        name: {
            "cases": len(errors(name)),
            "median": round(statistics.median(errors(name)), 3),
            "worst": round(max(errors(name)), 3),
        }
        for name in ("active", "reserved", "first_reserved", "formula", "accelerate")
        if errors(name)
    }
    for name, ones in (
        ("bound", rows),
        ("eager", eager),
    ):  # the second holds for what is not compiled
        ratios = [
            ratio["tokens" if name == "bound" else "eager"]
            for _, ratio in ones
            if "tokens" in ratio
        ]
        found[name] = {
            "cases": len(ratios),
            "beaten": sum(one < 1 for one in ratios),
            "within_2": sum(one <= 2 for one in ratios),
            "least": min(ratios),
            "median": statistics.median(ratios),
            "most": max(ratios),
        }
    return found


def store(cases: list[Row], kept: dict[str, Row]) -> None:
    rows = [kept[case["name"]] for case in cases if case["name"] in kept]
    write(RESULT, {"summary": summary(cases, kept), "cases": rows})


def main() -> None:
    cases = yaml.safe_load((HERE / "published.yaml").read_text())["cases"]
    names = [name for name in sys.argv[1:] if name != "--table"]
    kept: dict[str, Row] = {row["name"]: row for row in json.loads(RESULT.read_text())["cases"]}
    if "--table" not in sys.argv:
        with capacity_runs_of() as run_for_capacity:
            done: dict[tuple[str, int], Seen] = {}
            for case in (case for case in cases if not names or case["name"] in names):
                key = (case["args"], case["nproc"])
                if key not in done:
                    done[key] = run_for_capacity(
                        HERE / "llama.py", shlex.split(case["args"]), case["nproc"]
                    )
                plan = predicted(done[key], case)
                kept[case["name"]] = {"name": case["name"], **plan}
                kept[case["name"]] |= (
                    {"ratio": compared(case, plan)} if "errors" not in plan else {}
                )
                store(cases, kept)
                print(table([case], kept).splitlines()[-1], flush=True)
    print(table(cases, kept), "\n", json.dumps(summary(cases, kept), indent=1))


if __name__ == "__main__":
    main()
