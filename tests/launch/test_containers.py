"""Containers and schedulers cannot be run here: what they name exists, and their commands start what they say."""

import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
CLUSTER = ROOT / "scripts" / "cluster"
FILES = [ROOT / "Dockerfile", *sorted(CLUSTER.iterdir())]
# what SkyPilot sets on each node, besides its own task
SKYPILOT = {
    "SKYPILOT_NUM_NODES": "2",
    "SKYPILOT_NODE_RANK": "1",
    "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2",
    "SKYPILOT_NUM_GPUS_PER_NODE": "8",
}
SKYPILOT_KEYS = {"name", "workdir", "num_nodes", "resources", "envs", "setup", "run"}


def documents(path):
    """The documents of a YAML file."""
    return [yaml.safe_load(text) for text in path.read_text().split("\n---\n")]


def settings():
    """Names of the launchers' settings, from the page that lists them, and of flags that can be set like them."""
    page = (ROOT / "docs" / "running.md").read_text()
    table = page.partition("## Settings")[2].partition("## Checks")[0]
    shell = (ROOT / "scripts" / "post_train" / "settings.sh").read_text()
    flags = shell.partition("ENVIRONMENT_FLAGS=(")[2].partition(")")[0].upper().split()
    places = ["NNODES", "NODE_RANK", "NODE_NAME"]
    return {*re.findall(r"\b[A-Z_]{4,}\b", table), *flags, *places}


def command_of(script, environment):
    """What a script would start on a node: the words of its torchrun command."""
    assert script.count("train_grpo.sh") == 1
    script = script.replace("train_grpo.sh", "train_grpo.sh --dry_run")
    known = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    output = subprocess.run(
        ["bash", "-c", script],
        cwd=ROOT,
        env=known | environment,
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return shlex.split(output.splitlines()[-1])


def flag(words, name):
    return words[words.index(name) + 1]


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name)
def test_every_file_that_is_named_exists(path):
    named = re.findall(r"\b(?:scripts|configs)/[\w./-]+\w", path.read_text())
    named += re.findall(r"\b[\w-]+\.(?:sh|txt)\b", path.read_text())
    for name in named:
        places = (ROOT / name, ROOT / "scripts" / "post_train" / name)
        assert any(place.exists() for place in places), name
    called = r"(?:RUN |sage-grpo |^ +)make ([a-z]+)"
    targets = re.findall(called, path.read_text(), re.MULTILINE)
    assert targets or path.name == "kubernetes.yaml"
    makefile = (ROOT / "Makefile").read_text()
    assert all(re.search(rf"^{target}:", makefile, re.MULTILINE) for target in targets)


def test_the_image_is_pinned_unprivileged_and_without_weights():
    lines = (ROOT / "Dockerfile").read_text().splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if re.match(r"[A-Z]+ ", line)]
    by_name = {}
    for name, rest in instructions:
        by_name.setdefault(name, []).append(rest)
    (base,) = by_name["FROM"]
    assert re.fullmatch(r"nvidia/cuda:\d+\.\d+\.\d+-runtime-ubuntu\d\d\.\d\d", base)
    assert by_name["USER"] == ["sage"]
    for rest in by_name["COPY"]:
        *sources, _ = [word for word in rest.split() if not word.startswith("--")]
        assert all((ROOT / source).exists() for source in sources)
    copied_last = max(i for i, (name, _) in enumerate(instructions) if name == "COPY")
    assert instructions[copied_last - 1][0] == "RUN"  # the requirements have a layer of their own

    ignored = (ROOT / ".dockerignore").read_text().split()
    assert {"ckpts", "outputs*", ".venv", ".git"} <= set(ignored)
    requirements = (ROOT / "requirements.txt").read_text().splitlines()
    assert all("==" in line for line in requirements if line and not line.startswith("#"))


def test_each_pod_of_the_kubernetes_job_starts_its_share_of_the_run():
    service, job = documents(CLUSTER / "kubernetes.yaml")
    spec = job["spec"]
    pod = spec["template"]["spec"]
    (container,) = pod["containers"]
    environment = {item["name"]: item["value"] for item in container["env"]}
    assert environment.keys() <= settings()

    # pods find each other
    assert (service["spec"]["clusterIP"], spec["completionMode"]) == ("None", "Indexed")
    assert pod["subdomain"] == service["metadata"]["name"]
    assert service["spec"]["selector"].items() <= spec["template"]["metadata"]["labels"].items()
    assert environment["MASTER_ADDR"] == f"{job['metadata']['name']}-0.{pod['subdomain']}"
    assert str(service["spec"]["ports"][0]["port"]) == environment["MASTER_PORT"]
    assert spec["completions"] == spec["parallelism"] == int(environment["NNODES"])
    assert container["resources"]["limits"]["nvidia.com/gpu"] == int(environment["NUM_GPUS"])

    # and end as the launcher promises
    assert pod["terminationGracePeriodSeconds"] > int(environment["STOP_GRACE"])
    codes = {
        rule["action"]: rule["onExitCodes"]["values"]
        for rule in spec["podFailurePolicy"]["rules"]
        if "onExitCodes" in rule
    }
    assert codes == {"FailJob": [2], "Ignore": [75]}
    assert pod["restartPolicy"] == "Never"  # which such a policy needs
    assert pod["securityContext"]["runAsNonRoot"] is True

    volumes = {volume["name"] for volume in pod["volumes"]}
    assert {mount["name"] for mount in container["volumeMounts"]} == volumes

    (script,) = container["args"]
    place = {"JOB_COMPLETION_INDEX": "3", "HOSTNAME": "sage-grpo-3"}
    words = command_of(script, environment | place)
    assert (flag(words, "--nnodes"), flag(words, "--nproc_per_node")) == ("8", "8")
    assert flag(words, "--rdzv_endpoint") == "sage-grpo-0.sage-grpo:29400"
    assert flag(words, "--local_addr") == "sage-grpo-3.sage-grpo"
    assert flag(words, "--config") == environment["CONFIG"]
    assert flag(words, "--output_dir") == environment["OUTPUT_DIR"]


def test_each_node_of_the_skypilot_task_starts_its_share_of_the_run():
    (task,) = documents(CLUSTER / "skypilot.yaml")
    assert task.keys() <= SKYPILOT_KEYS
    assert task["envs"].keys() <= settings()
    words = command_of(task["run"], task["envs"] | SKYPILOT)
    assert (flag(words, "--nnodes"), flag(words, "--nproc_per_node")) == ("2", "8")
    assert flag(words, "--rdzv_endpoint") == "10.0.0.1:29400"
    assert flag(words, "--local_addr") == "10.0.0.2"
    assert flag(words, "--config") == task["envs"]["CONFIG"]
    subprocess.run(["bash", "-n", "-c", task["setup"]], check=True)


def test_the_page_says_that_none_of_them_was_run():
    page = (ROOT / "docs" / "running.md").read_text()
    section = page.partition("## Containers and schedulers")[2].partition("\n## ")[0]
    assert "None of these has been built or run by us" in section
    for path in FILES:
        assert path.name in section
    line = next(line for line in section.splitlines() if line.startswith("    apptainer exec"))
    words = shlex.split(line)
    assert words[-2:] == ["bash", "run_post_train.sh"] and (ROOT / words[-1]).is_file()
