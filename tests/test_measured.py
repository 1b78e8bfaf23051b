"""What the documents claim was measured is what the committed results say."""

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import gpu
import versions
from exam import FIGURES, WHOLE
from field import table as table_of_trainers
from field_seeds import seeds_of, totals
from field_seeds import table as table_of_seeds

import detection
from check_grader import KINDS
from detection_table import by_rule, in_page
from guard_section import section as guard_section
from install_matrix import good
from install_matrix import table as table_of_installs
from results_file import text, with_section, write
from robustness import good as clean
from robustness_inputs import KINDS as MALFORMED
from robustness_scripts import HOSTILE
from transformers_models import MODELS
from transformers_models import right as there_and_back
from verified_fsdp2.skill import installer
from verified_fsdp2.verifier.probe.compat.names import VERSIONS
from verified_fsdp2.verifier.rules import RULES

ROOT = Path(__file__).parents[1]
CORPUS = ROOT / "benchmarks" / "results" / "corpus.json"
RELIABILITY = (ROOT / "references" / "reliability.md").read_text(encoding="utf-8")
README = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())


def result(name: str) -> Any:
    return json.loads(
        (ROOT / "benchmarks" / "results" / f"{name}.json").read_text(encoding="utf-8")
    )


def claimed(pattern: str) -> tuple[int, ...]:
    """The numbers of a sentence of the README."""
    (found,) = re.finditer(pattern, README)
    return tuple(map(int, found.groups()))


def test_summaries_are_short() -> None:
    files = sorted((ROOT / "benchmarks" / "results").iterdir())
    assert sum(file.read_text(encoding="utf-8").count("\n") for file in files) <= 3300
    for file in files:
        assert (
            file.read_text(encoding="utf-8")
            == text(json.loads(file.read_text(encoding="utf-8"))) + "\n"
        ), file.name


def test_detection_summary_and_details_are_read_alike(tmp_path: Path) -> None:
    results = detection.read(CORPUS)
    assert json.loads(text(detection.stored(results))) == json.loads(CORPUS.read_text())
    write(tmp_path / "details.json", results)
    assert detection.read(tmp_path / "details.json") == results
    assert detection.summary(results["rows"], {})["found"] == results["found"]


def test_recall_and_false_alarms() -> None:
    results = result("corpus")
    pattern = r"(\d+) of (\d+) seeded faults found, (\d+) false alarms on (\d+) right scripts"
    measured = (
        results["found"],
        results["faults"],
        results["false_alarms"],
        results["right_scripts"],
    )
    assert claimed(pattern) == measured
    assert in_page(RELIABILITY, detection.read(CORPUS)) == RELIABILITY, "run `make detection`"
    assert by_rule(detection.read(CORPUS)) == detection.BY_RULE.read_text(encoding="utf-8"), (
        "run `make detection`"
    )


def test_public_trainers() -> None:
    rows = result("field")["rows"]
    judged = [row for row in rows if "not_run" not in row]
    failures = [one for row in judged for one in row["failures"] if not one["consequence"]]
    assert {one["true_fault"] for one in failures} == {True}
    assert table_of_trainers(rows) in RELIABILITY
    assert claimed(r"(\d+) public trainers.*?(\d+) failures") == (len(judged), len(failures))
    for row in rows:
        assert list((ROOT / "benchmarks" / "field").glob(f"{row['name']}.yaml")), row["name"]


def test_the_cost_on_a_public_trainer() -> None:
    results = result("field_cost")
    full, quick = (results["in_plain_runs"][kind] for kind in ("full", "quick"))
    assert (
        f"{results['trainer']} {full['seconds']} plain runs in full and {quick['seconds']} with"
        " `--quick`" in RELIABILITY
    )
    assert (
        f"at its largest {full['mebibytes']} and {quick['mebibytes']} times the memory"
        in RELIABILITY
    )


def test_seeds_in_public_trainers() -> None:
    results = result("field_seeds")
    assert totals(results["rows"]) == results["totals"]
    assert table_of_seeds(results["rows"]) in (
        ROOT / "benchmarks" / "field" / "seeds" / "README.md"
    ).read_text(encoding="utf-8")
    seeds = [
        seed
        for path in (ROOT / "benchmarks" / "field" / "seeds").glob("*.yaml")
        for seed in seeds_of(path)
    ]
    assert {row["id"] for row in results["rows"]} <= {seed["id"] for seed in seeds}
    assert {rule for seed in seeds for rule in seed["rules"]} <= set(RULES)
    (claim,) = re.finditer(
        r"At first sight (\d+) of (\d+) seeds were found, (\d+) rightly named, (\d+) of these in"
        r" the seeded file; "
        r"now (\d+), (\d+) and (\d+)",
        " ".join(RELIABILITY.split()),
    )
    sight, now = results["totals"]["first_sight"], results["totals"]["now"]
    order = ("found", "seeds", "named", "named_and_located")
    expected = [*(sight[key] for key in order), *(now[key] for key in order if key != "seeds")]
    assert [int(one) for one in claim.groups()] == expected


def test_every_mutant_was_killed() -> None:
    results = result("mutation")
    assert results["living"] == [] and results["mutants"] > 0


def test_no_disturbed_run_lost_or_repeated_a_sample_and_every_flipped_bit_was_refused() -> None:
    results = result("scaffold_kill")
    kinds = [row["kind"] for row in results["trials"] if row["ok"]]
    assert (kinds.count("SIGKILL"), kinds.count("SIGTERM"), len(results["trials"])) == (20, 10, 30)
    assert {row["mode"] for row in results["trials"]} == {"sync", "thread", "process"}
    assert results["controls"] and all(row["noticed"] for row in results["controls"])
    results = result("scaffold_bitflip")
    assert [row["ok"] for row in results["trials"]] == [True] * 20
    assert results["control"]["resumed_from"] == 4 and not results["control"]["named"]


def test_a_save_in_the_background_holds_the_loop_for_a_tenth_at_most() -> None:
    results = result("async_save")
    for run in results["runs"]:
        assert run["bytes"] > 1e9 and max(run["ratio"].values()) <= results["limit"] == 0.1


def test_every_way_to_install_works() -> None:
    results = result("install_matrix")
    assert [row["command"] for row in results["rows"] if not good(row)] == []
    ours = [row for row in results["rows"] if row["installer"] == "fsdp2 install"]
    assert {client for row in ours for client in row["clients"]} == set(installer.PLACES)
    assert max(row["seconds"] for row in ours) <= 1
    seen = {client for row in results["rows"] for client in row["seen"]}
    assert seen == set(installer.PLACES) - {"cursor"}, "Cursor has no command that lists its skills"
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert table_of_installs(results) in readme or "| installer |" not in readme


def test_half_of_the_retrofit_scripts_are_converted_without_an_edit() -> None:
    results = result("convert")
    rows = results["rows"]
    assert results["scripts"] == len(rows) >= 7 and results["untouched"] == sum(
        row["untouched"] for row in rows
    )
    assert 2 * results["untouched"] >= len(rows)
    assert results["passed_but_wrong"] == []
    assert all(
        row["untouched"] == (row["verdict"] == "pass") and row.get("right", True) for row in rows
    )


def test_the_grader_judges_as_every_task_expects() -> None:
    results = result("grader")
    for row in results["rows"]:
        assert row["as_foreseen"] and row["seconds"] <= 60, (row["task"], row["variant"])
        assert row["passed"] == (not row["failed"])
    assert results["tasks"] == results["solution"]["graded"] == results["start"]["graded"] >= 24
    assert results["wrong"]["graded"] >= 24
    assert all(results[kind]["graded"] == results[kind]["as_foreseen"] > 0 for kind in KINDS)
    assert results["longest_seconds"] == max(row["seconds"] for row in results["rows"])
    counts = tuple(results[kind]["graded"] for kind in ("solution", "right", "start", "wrong"))
    pattern = (
        r"all (\d+) reference solutions and (\d+) other .* all (\d+) untouched starts and (\d+)"
        r" seeded wrong"
    )
    assert claimed(pattern) == counts


def test_models_of_transformers_come_back_bit_for_bit() -> None:
    results = result("transformers_models")
    assert results["models"].keys() == MODELS.keys()
    assert all(there_and_back(row) for row in results["models"].values())
    assert all(row["lora"]["peft_logits_apart"] == 0.0 for row in results["models"].values())


def test_nothing_malformed_hostile_or_interrupted_leaves_anything() -> None:
    results = result("robustness")
    assert clean(results)
    assert sum(row["inputs"] for row in results["inputs"]) >= 1000
    assert {row["kind"] for row in results["inputs"]} > set(MALFORMED)
    assert results["scripts"][0]["inputs"] == len(HOSTILE)
    assert all(row["sent"] >= 18 and row["survivors"] == 0 for row in results["signals"])
    assert {row["signal"] for row in results["signals"]} == {"SIGINT", "SIGTERM", "SIGKILL"}
    assert results["parallel"]["starts"] == 50


def test_the_versions_are_published() -> None:
    results = result("versions")
    assert VERSIONS.keys() == {row["torch"] for row in results["rows"] if "refused" not in row}
    assert with_section(RELIABILITY, versions.table(results["rows"])) == RELIABILITY, (
        "run `make versions`"
    )


def test_each_round_of_the_exam_is_published() -> None:
    results = result("exam")
    for row in results["rounds"]:
        (line,) = (
            line for line in RELIABILITY.splitlines() if line.startswith(f"| {row['round']} | ")
        )
        cells = line.split(" | ")[1:]
        for cell, name in zip(cells, FIGURES, strict=True):
            assert cell.startswith(f"{row[name]['number']} of {row[name]['of']} ("), (
                row["round"],
                name,
            )
    for row in results["laws"]:
        assert "| " + " | ".join(map(str, row.values())) + " |" in RELIABILITY, row["law"]
    found, failed = results["rounds"][-1]["found"], results["rounds"][-1]["false_alarms"]
    claim = (
        f"{found['number']} of {found['of']} silent faults found, {failed['number']} of"
        f" {failed['of']} right scripts"
    )
    assert f"{claim} failed" in README


def test_the_whole_exam_is_named_by_its_commit() -> None:
    assert result("exam")["commit"] == WHOLE
    for page in (RELIABILITY, (ROOT / "tests" / "exam" / "README.md").read_text(encoding="utf-8")):
        assert WHOLE[:8] in page


def test_what_was_judged_again_is_published() -> None:
    results = result("exam")["again"]
    faults, right = results["found_before"], results["right"]
    text = " ".join(RELIABILITY.split())
    assert f"{faults['found_again']} of {faults['of']} faults found before are found again" in text
    assert (
        f"{right['failed']} of {right['of']} right scripts fail and {right['inconclusive']} are"
        " inconclusive" in text
    )


def test_the_launchers_are_published() -> None:
    results = result("launchers")
    rows = results["slurm"]["rows"]
    assert (
        f"{sum(row['same'] for row in rows)} of {len(rows)} scripts get the verdict of forked ranks"
        in RELIABILITY
    )
    for part in ("slurm", "namespaces"):
        assert results[part]["lost"]["run"].endswith("stopped answering, and rank 1 with it")
        assert results[part]["lost"]["left"] == 0


def test_what_a_gpu_showed_is_published() -> None:
    results = result("gpu")
    assert with_section(RELIABILITY, gpu.table(results)) == RELIABILITY, (
        "run `benchmarks/gpu.py benchmarks/results/gpu.json --table references/reliability.md`"
    )
    assert results["rehearsal"] is False
    rows = results["verdicts"]["rows"]
    named = [row["first"] == row["rule"] for row in rows if row["rule"]]
    right = [not row["failed"] for row in rows if not row["rule"]]
    pattern = r"0 of (\d+) right scripts failed, (\d+) of (\d+) faults named"
    assert claimed(pattern) == (len(right), sum(named), len(named)) and all(right)
    assert {row["rule"] for row in results["verdicts"]["rows"] if row["rule"]} == {
        row["first"] for row in results["verdicts"]["rows"] if row["first"]
    }


def test_the_page_on_a_run_of_a_day_shows_what_was_printed() -> None:
    day, page = (
        result("run_of_a_day"),
        (ROOT / "examples" / "day" / "README.md").read_text(encoding="utf-8"),
    )
    assert day["ok"] and {row.get("signal") for row in day["commands"]} == {
        None,
        "SIGTERM",
        "SIGKILL",
    }
    assert all((row["exit"] != 0) == ("signal" in row) for row in day["commands"])
    printed = {line for row in day["commands"] for line in row["prints"]}
    shown = "\n".join(re.findall(r"```text\n(.*?)```", page, flags=re.DOTALL)).splitlines()
    assert len(shown) > 20 and {line for line in shown if line} <= printed
    trained = sum(
        row["seconds"]
        for row in day["commands"]
        if row["in"] == "pretrain" and "train.py" in row["command"]
    )
    assert (
        f"{day['seconds']:,} s" in page
        and f"load of {day['load']}" in page
        and f"{int(trained):,} s" in page
    )
    assert {f"{apart:.2e}" for apart in day["checks"]["logits apart at most"].values()} <= {
        *page.replace(")", " ").split()
    }


def test_every_example_has_passed() -> None:
    """On 1, 2 and 4 ranks or what its mesh allows; a large one at the size of its verification."""
    rows = {row["spec"]: row for row in result("examples")["rows"]}
    folder = ROOT / "examples"
    named = {path.stem for path in folder.glob("*.yaml")} | {
        path.parent.name for path in folder.glob("*/spec.yaml")
    }
    assert named == {*rows} and len(named) >= 24
    assert {
        name
        for name, row in rows.items()
        if (row["verdict"], row["findings"], row["linted"]) != ("pass", [], True)
    } == set()


def test_what_agents_did_is_published() -> None:
    results = result("agents")
    page = (ROOT / "evals" / "results.md").read_text(encoding="utf-8")
    for row in results["rows"]:
        (line,) = (
            line
            for line in page.splitlines()
            if line.startswith(f"| {row['run']} | {row['task']} | ")
        )
        cells = line.strip("| ").split(" | ")[2:]
        for mine, own in ((cells[:5], row["with"]), (cells[5:], row["without"])):
            found = own or {}
            numbers = [
                found.get(name) for name in ("minutes", "proved", "commands", "verifications")
            ]
            passed = {None: "-", True: "yes", False: "no"}[found.get("passed")]
            assert (
                mine
                == [passed, *("-" if value is None else str(value) for value in numbers)][
                    : len(mine)
                ]
            ), line
    pairs = [row for row in results["rows"] if row["with"] and row["without"]]
    for one, words in (("with", "with the skill"), ("without", "without")):
        of = [row[one] for row in results["rows"] if row[one]]
        assert (results[one]["passed"], results[one]["of"]) == (
            sum(row["passed"] for row in of),
            len(of),
        )
        assert f"{results[one]['passed']} of {results[one]['of']} {words}" in page
        for name, medians in results[one]["pairs"].items():
            own = [row[one] for row in pairs if f"run {row['run']}" == name]
            for key, value in medians.items():
                assert value == round(median(row[key] for row in own if row[key] is not None), 1), (
                    one,
                    name,
                    key,
                )


def test_loaders_on_json_lines() -> None:
    speed = {
        row["loader"]: f"{row['tokens_per_second'] / 1e6:.1f}"
        for row in result("loader_text_speed")["rows"]
    }
    text = " ".join((ROOT / "references" / "scaling.md").read_text(encoding="utf-8").split())
    assert (
        f"{speed['generated']} million tokens a second by the generated loader"
        f" ({speed['generated, once']} where" in text
    )
    assert (
        f"{speed['lingua']} by lingua's (437d680), {speed['torchtitan']} by torchtitan's (b5bcd76)"
        in text
    )


def test_the_loss_in_chunks() -> None:
    found = result("chunked_loss")
    plain, chunked = found["plain"]["memory"], found["chunked"]["memory"]
    text = " ".join((ROOT / "references" / "numbers.md").read_text(encoding="utf-8").split())
    assert (
        f"held {plain:.1f} times its float32 logits, in chunks {chunked}, in {found['time_ratio']}"
        " of the time" in text
    )
    assert chunked <= 0.25 and found["time_ratio"] <= 1.1


def test_small_public_scripts() -> None:
    rows = result("small_scripts")["rows"]
    judged = [word for row in rows for word in row["findings"].values()]
    page = " ".join((ROOT / "README.md").read_text(encoding="utf-8").split())
    places = len({row["repository"] for row in rows})
    assert f"On {len(rows)} small public scripts of {places} repositories" in page
    assert f"it reported {len(judged)} faults, all of them true" in page and set(judged) == {"true"}


def test_the_section_of_the_guard_is_that_of_its_results() -> None:
    assert "\n".join(guard_section()) in RELIABILITY
