"""The files of `launch`: what is in them for an engine, that shells and YAML readers take them,
that odd values stay values.
"""

import importlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep
from typing import Any

import pytest
import torch.distributed as dist
import yaml

from records import cases
from test_scaffold import DECODER, IMPORTED, load
from verified_fsdp2.skill import scaffold, spec
from verified_fsdp2.skill.scaffold.launch import FILES
from verified_fsdp2.skill.scaffold.literals import shell
from verified_fsdp2.skill.spec import SpecError
from verified_fsdp2.verifier.guard.settings import Settings, read

ALL: dict[str, Any] = {
    "engines": ["torchrun", "slurm", "kubernetes", "ray", "skypilot"],
    "nodes": 2,
    "devices_per_node": 4,
    "cpus_per_device": 3,
    "slurm_partition": "gpu,long",
    "slurm_account": "research",
    "slurm_time": "1-00:00:00",
    "kubernetes_image": "registry.example.com/team/trainer:1",
    "kubernetes_claim": "runs",
    "kubernetes_namespace": "training",
    "skypilot_accelerator": "A100-80GB",
    "skypilot_volume": "runs",
}
ODD = [
    "plain",
    "a b",
    "it's",
    'a"b',
    "$(touch x)",
    "`touch x`",
    "a;touch x",
    "*",
    "-n",
    "a\nb",
    "gr\u00f6\u00dfe 1",
]
ODD += ["\\", "~"]


def files(
    folder: Path, launch: dict[str, Any], settings: tuple[str, ...] = (), base: Any = DECODER
) -> dict[str, str]:
    loaded = load(folder, {**base, "launch": launch}, settings)
    return {
        path: text for path, text in scaffold.render(loaded).items() if path.startswith("launch/")
    }


def only(folder: Path, engine: str, **more: Any) -> str:
    own = {
        key: value
        for key, value in ALL.items()
        if key.startswith(engine) or "_" not in key or "per" in key
    }
    (text,) = files(folder, {**own, "engines": [engine], **more}).values()
    return text


def bash(*words: str, **more: Any) -> subprocess.CompletedProcess[str]:
    more = {"timeout": 30, "capture_output": True, "text": True, "encoding": "utf-8", **more}
    return subprocess.run(["bash", *words], check=False, **more)


def script(engine: str, text: str) -> str:
    if engine == "kubernetes":
        return str(yaml.safe_load(text)["spec"]["trainer"]["args"][0])
    return str(yaml.safe_load(text)["run"]) if engine == "skypilot" else text


@pytest.mark.parametrize("base", [DECODER, IMPORTED], ids=["decoder", "import"])
def test_off_leaves_no_trace(tmp_path: Path, base: Any) -> None:
    plain = scaffold.render(load(tmp_path, base))
    assert not [path for path in plain if path.startswith("launch")]
    for text in plain.values():
        assert not re.search(r"launch|slurm|kubernetes|sky|PET_|agree_on_name", text, re.I)
    assert scaffold.render(load(tmp_path, {**base, "launch": {"engines": []}})) == plain


@pytest.mark.parametrize("engine", FILES)
def test_an_engine_is_one_file_and_a_line_of_the_readme(tmp_path: Path, engine: str) -> None:
    own = {key: value for key, value in ALL.items() if key.startswith(engine)}
    loaded = load(
        tmp_path, {**DECODER, "launch": {"engines": [engine], "devices_per_node": 4, **own}}
    )
    rendered = scaffold.render(loaded)
    assert [path for path in rendered if path.startswith("launch")] == [FILES[engine]]
    assert f"| `launch/` | starts it on 1 node of 4: {engine};" in rendered["README.md"]
    (tmp_path / "again.yaml").write_text(rendered["spec.yaml"])
    assert spec.load(tmp_path / "again.yaml") == loaded
    off = spec.load(tmp_path / "again.yaml", ["launch.engines=[]"])
    assert scaffold.render(off) == scaffold.render(load(tmp_path))


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("device", ["gpu", "cpu"])
@pytest.mark.parametrize("engine", ["torchrun", "slurm", "kubernetes", "skypilot"])
def test_bash_takes_every_script(tmp_path: Path, engine: str, device: str, nodes: int) -> None:
    more = {"skypilot_accelerator": None} if (engine, device) == ("skypilot", "cpu") else {}
    text = script(engine, only(tmp_path, engine, device=device, nodes=nodes, **more))
    done = bash("-n", input=text)
    assert (done.returncode, done.stderr) == (0, "")
    assert "set -euo pipefail" in text and "\t" not in text


def test_ranks_of_several_nodes_meet_under_a_name_of_their_own(tmp_path: Path) -> None:
    """Nodes count restarts each for itself: the count is no name to meet under."""
    text, alone = only(tmp_path, "torchrun"), only(tmp_path, "torchrun", nodes=1)
    options = (
        "--nnodes=2",
        "--rdzv-backend=c10d",
        "--rdzv-conf=join_timeout=600",
        "--max-restarts=3",
    )
    assert [option for option in options if option not in text] == []
    assert not re.search("node-rank|standalone", text) and not re.search("rdzv|HEAD", alone)
    assert "--standalone" in alone
    for engine, nodes, met in (
        ("torchrun", 2, True),
        ("slurm", 2, True),
        ("torchrun", 1, False),
        ("ray", 2, False),
    ):
        launch = {"engines": [engine], "nodes": nodes, "devices_per_node": 2}
        text = scaffold.render(load(tmp_path, {**DECODER, "launch": launch}))["distributed.py"]
        assert ("agree_on_name" in text) == met != ("TORCHELASTIC_RESTART_COUNT" in text)


def test_the_lines_that_sbatch_reads(tmp_path: Path) -> None:
    lines = re.findall(r"^#SBATCH (.*)$", only(tmp_path, "slurm"), re.M)
    wanted = (
        "--job-name=sample --nodes=2 --ntasks-per-node=1 --gpus-per-node=4 --cpus-per-task=12"
        " --partition=gpu,long "
    )
    wanted += (
        "--account=research --time=1-00:00:00 --output=%x-%j.log --open-mode=append --requeue"
        " --signal=B:USR1@120"
    )
    assert lines == wanted.split()
    bare = only(
        tmp_path, "slurm", device="cpu", slurm_partition=None, slurm_account=None, slurm_time=None
    )
    assert not re.search(r"gpus|partition|account|#SBATCH --time", bare)


def test_times_follow_the_grace_of_the_checkpoints(tmp_path: Path) -> None:
    found = files(tmp_path, ALL, ("checkpoint.grace_seconds=99.5",))
    assert "--shutdown-timeout=100" in found["launch/torchrun.sh"]
    assert "--signal=B:USR1@160" in found["launch/slurm.sbatch"]
    assert "terminationGracePeriodSeconds: 130" in found["launch/kubernetes.yaml"]


def test_the_train_job_and_the_sky_task(tmp_path: Path) -> None:
    job = yaml.safe_load(only(tmp_path, "kubernetes"))
    assert (job["apiVersion"], job["kind"]) == ("trainer.kubeflow.org/v1alpha1", "TrainJob")
    assert job["metadata"] == {"name": "sample", "namespace": "training"}
    trainer = job["spec"]["trainer"]
    assert (trainer["numNodes"], trainer["numProcPerNode"]) == (2, 4)
    assert trainer["resourcesPerNode"] == {"requests": {"cpu": 12}, "limits": {"nvidia.com/gpu": 4}}
    cpu = yaml.safe_load(only(tmp_path, "kubernetes", device="cpu", kubernetes_namespace=None))
    assert cpu["spec"]["trainer"]["resourcesPerNode"] == {"requests": {"cpu": 12}}
    assert "namespace" not in cpu["metadata"]
    task = yaml.safe_load(only(tmp_path, "skypilot"))
    assert task["num_nodes"] == 2 and task["volumes"] == {"/checkpoints": "runs"}
    assert task["resources"]["accelerators"] == "A100-80GB:4"


@pytest.mark.parametrize("value", ODD)
def test_a_value_is_one_word_of_bash(value: str, tmp_path: Path) -> None:
    assert (
        shell(value).isascii()
        and bash("-c", f"printf %s {shell(value)}", cwd=tmp_path).stdout == value
    )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("folder", [odd for odd in ODD if odd != "-n"])
def test_odd_folders_of_runs_stay_values(tmp_path: Path, folder: str) -> None:
    """What torchrun gets, from the script itself, with a torchrun that prints it."""
    base = {**DECODER, "checkpoint": {"directory": folder}, "operation": {"guard": True}}
    (text,) = files(tmp_path, {"engines": ["torchrun"], "devices_per_node": 2}, base=base).values()
    place = tmp_path / "bin"
    (place / "launch").mkdir(parents=True)
    (place / "launch" / "torchrun.sh").write_text(text)
    (place / "torchrun").write_text('#!/bin/sh\nprintf \'%s\\0\' "$FSDP2_GUARD" "$@"\n')
    (place / "torchrun").chmod(0o755)
    done = bash("launch/torchrun.sh", "--resume", cwd=place, env={"PATH": f"{place}:/usr/bin:/bin"})
    guard, *words = done.stdout.split("\0")[:-1]
    assert read(guard) == Settings(out=f"{folder}/guard.jsonl")
    assert f"--log-dir={folder}/logs" in words
    assert words[-2:] == ["train.py", "--resume"]
    assert sorted(file.name for file in place.iterdir()) == ["launch", "torchrun"]


def test_each_start_of_a_run_adds_to_one_journal_of_the_guard(tmp_path: Path) -> None:
    made = files(tmp_path, {**ALL, "nodes": 1}, ("operation.guard=true",))
    job = yaml.safe_load(made["launch/kubernetes.yaml"])["spec"]["trainer"]
    variables = {one["name"]: one["value"] for one in job["env"]}
    assert read(variables["FSDP2_GUARD"]) == Settings(out="/checkpoints/sample/guard.jsonl")
    for engine, out in (
        ("torchrun", "out"),
        ("slurm", "out/job-7"),
        ("skypilot", "/checkpoints/task-1"),
    ):
        (line,) = re.findall("^export FSDP2_GUARD.*", script(engine, made[FILES[engine]]), re.M)
        start = f'{line}; printf %s "$FSDP2_GUARD"'
        env = {"PATH": "/usr/bin:/bin", "SLURM_JOB_ID": "7", "out": out}
        words = bash("-c", start, env=env).stdout
        assert read(words) == Settings(out=f"{out}/guard.jsonl"), engine
        assert bash("-c", start, env={**env, "FSDP2_GUARD": "off"}).stdout == "off"


def test_memory_of_gpus_grows_by_every_engine(tmp_path: Path) -> None:
    setting = "expandable_segments:True"
    made = files(tmp_path, {**ALL, "nodes": 1}, ())
    assert {name for name in FILES.values() if setting in made[name]} == {*FILES.values()}
    (tmp_path / "cpu").mkdir()
    made = files(tmp_path / "cpu", {"engines": ["torchrun"], "device": "cpu"}, ())
    assert setting not in made[FILES["torchrun"]]


@cases(
    "launch, key, message",
    ({"nodes": 2}, "launch.nodes", "does nothing without launch.engines"),
    ({"engines": ["ray"], "slurm_time": "10"}, "launch.slurm_time", "launch.engines has no slurm"),
    ({"engines": ["slrum"]}, "launch.engines[0]", "did you mean 'slurm'?"),
    (
        {"engines": ["slurm"], "partition": "gpu"},
        "launch.partition",
        "did you mean 'slurm_partition'?",
    ),
    (
        {"engines": ["slurm"], "slurm_partition": "a b"},
        "launch.slurm_partition",
        "the name of a partition",
    ),
    (
        {"engines": ["slurm"], "slurm_time": "1 day"},
        "launch.slurm_time",
        "a time as Slurm writes it",
    ),
    (
        {"engines": ["kubernetes"]},
        "launch.kubernetes_image",
        "kubernetes needs the container image",
    ),
    (
        {"engines": ["skypilot"], "skypilot_volume": "v"},
        "launch.skypilot_accelerator",
        "for example H100",
    ),
    (
        {"engines": ["torchrun"], "nodes": 3},
        "launch.nodes",
        "16 is no multiple of train.micro_batch 1",
    ),
)
def test_what_does_not_fit_is_refused(
    tmp_path: Path, launch: dict[str, Any], key: str, message: str
) -> None:
    with pytest.raises(SpecError) as caught:
        load(tmp_path, {**DECODER, "launch": launch})
    found = {problem.key: problem for problem in caught.value.problems}
    assert message in found[key].message
    assert found[key].place.line > 1


def test_meshes_and_names_that_do_not_fit(tmp_path: Path) -> None:
    launch = {"engines": ["ray"], "nodes": 2, "devices_per_node": 2}
    with pytest.raises(SpecError, match="mesh"):
        load(tmp_path, {**DECODER, "launch": launch}, ["parallel.dp_shard=2"])
    settings = ["parallel.dp_shard=2", "parallel.tp=2", "verify={nproc: 4, reshard_to: []}"]
    load(tmp_path, {**DECODER, "launch": launch}, settings)
    for nodes, setting in ((3, "parallel.tp=2"), (1, "parallel.dp_replicate=2")):
        with pytest.raises(SpecError, match=r"parallel\.dp_replicate"):
            load(
                tmp_path,
                {**DECODER, "launch": {**launch, "nodes": nodes, "devices_per_node": 1}},
                [setting],
            )
    launch = {
        key: ALL[key]
        for key in ("kubernetes_image", "kubernetes_claim", "nodes", "devices_per_node")
    }
    for name, message in (("a-", "must end with"), ("a" * 60, "at most 54 characters")):
        with pytest.raises(SpecError, match=message):
            load(
                tmp_path, {**DECODER, "name": name, "launch": {**launch, "engines": ["kubernetes"]}}
            )


def test_a_start_agrees_on_a_name_whatever_died_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = load(
        tmp_path,
        {**DECODER, "launch": {"engines": ["torchrun"], "nodes": 2, "devices_per_node": 2}},
    )
    (tmp_path / "distributed_on_nodes.py").write_text(scaffold.render(loaded)["distributed.py"])
    monkeypatch.syspath_prepend(str(tmp_path))
    module = importlib.import_module("distributed_on_nodes")
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    for rank in (1, 2, 3):
        server.set(f"fsdp2/latest/{rank}", f"fsdp2/call/{rank}/of-one-that-died")

    def start(rank: int) -> str:
        sleep(0.3 * (rank % 3))  # rank 0 looks before the others have called
        name: str = module.agree_on_name(dist.TCPStore("127.0.0.1", server.port), rank, 4)
        return name

    names = []
    for _ in range(2):
        with ThreadPoolExecutor(4) as pool:
            agreed = set(pool.map(start, range(4)))
        assert len(agreed) == 1
        names += agreed
    assert names[0] != names[1]


SAVE = 'mkdir -p "out/job-7/run-001/checkpoints/step_00000004" && touch "$_/SHA256SUMS"'
SRUN = {
    "all steps done": ("exit 0", 0, False),
    "a fault before anything is saved": ("exit 1", 1, False),
    "a fault after a save": (f"{SAVE}; exit 1", 1, True),
    "a signal": (
        (
            f"trap '{SAVE}; exit 1' USR1; sleep 0.5; kill -USR1 $PPID; for i in $(seq 400); do"
            " sleep 0.05; done"
        ),
        1,
        True,
    ),
}


@pytest.mark.parametrize("name", SRUN)
def test_when_a_slurm_job_is_queued_again(tmp_path: Path, name: str) -> None:
    """The batch script itself, with a stand-in for srun; twice: what was saved before the start
    does not count.
    """
    does, status, again = SRUN[name]
    (tmp_path / "slurm.sbatch").write_text(only(tmp_path, "slurm"))
    commands = {"srun": does, "scontrol": '[ "$1" = show ] && echo n1 || echo "$*" >> asked'}
    for command, text in commands.items():
        (tmp_path / command).write_text(
            f'#!/bin/bash\n[ {command} = srun ] && echo "$@" >> given\n{text}\n'
        )
        (tmp_path / command).chmod(0o755)
    variables = {
        "JOB_ID": "7",
        "JOB_NODELIST": "n[1-2]",
        "JOB_NUM_NODES": "2",
        "CPUS_PER_TASK": "2",
    }
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"} | {
        f"SLURM_{name}": value for name, value in variables.items()
    }
    for start in (1, 2):
        done = bash("slurm.sbatch", "--steps", "9", cwd=tmp_path, env=env)
        assert (done.returncode, done.stderr) == (status, "")
        given = (tmp_path / "given").read_text().splitlines()[-1]
        resume = "" if start == 1 or not again else "--resume "
        assert given.endswith(f"--out out/job-7 {resume}--steps 9")
        asked = tmp_path / "asked"
        assert (asked.read_text() if asked.exists() else "") == "requeue 7\n" * again
