"""What the launchers would run, word for word, and what they reject."""

import re
import shlex
import shutil
import subprocess

import pytest

from sage_grpo.config.parse import parse
from tests.launch.shell import PDSH, ROOT, TRAIN, commands, launch, options
from tests.smallest_run import slow

PUBLISHED = shlex.split("""
--pretrained_model_root ./ckpts --learning_rate 1e-5 --batch_size 2 --num_generations 4 --max_steps 10000
--output_dir ./outputs --enable_fsdp --enable_gradient_checkpointing --sp_size 2 --sde_type sage_grpo
--use_grad_balancing True --enable_timestep_permutation True --kl_weight 1e-5 --kl_coef 1e-7 --use_moving_KL True
--update_ref_model_step 10 --use_dual_kl True --dual_kl_moving_weight 1.0 --dual_kl_step_weight 0.1
--reference_mode_offload True""")


def test_one_machine_runs_this_command():
    (words,) = commands("run_post_train.sh", PYTHON="python3")
    run = "outputs/hunyuan15_8gpu"
    assert words == [
        "env", "TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=600", "PYTHONUNBUFFERED=1",
        "TQDM_MININTERVAL=10", f"SAGE_LAUNCH=localhost:{ROOT / run}",
        "python3", "-m", "torch.distributed.run", "--nnodes", "1", "--nproc_per_node", "8",
        "--rdzv_backend", "c10d", "--rdzv_endpoint", "localhost:0", "--rdzv_id", "outputs_hunyuan15_8gpu",
        "--rdzv_conf", "is_host=1,join_timeout=1800", "--local_addr", "localhost", "--max_restarts", "3",
        "--log_dir", f"{run}/logs/localhost", "--tee", "3",
        "post_train.py", "--config", "configs/hunyuan15_8gpu.yaml", "--output_dir", run,
        "--resume_from_checkpoint", "auto",
    ]  # fmt: skip


def test_its_values_are_those_of_the_published_command_but_for_the_kl_the_batch_and_the_length(
    monkeypatch,
):
    """docs/scaling.md has the reasons; with the published recipe there is no difference."""
    monkeypatch.chdir(ROOT)
    theirs = parse(PUBLISHED)
    names = {word[2:] for word in PUBLISHED if word.startswith("--")} - {
        "output_dir",
        "pretrained_model_root",
    }
    assert len(names) == 18
    different = {"kl_weight", "batch_size", "num_generations", "max_steps"}
    for settings, other in (
        ({}, different),
        ({"CONFIG": "configs/hunyuan15_8gpu_published.yaml"}, set()),
    ):
        (words,) = commands("run_post_train.sh", **settings)
        ours = parse(words[words.index("post_train.py") + 1 :])
        assert {name for name in names if getattr(ours, name) != getattr(theirs, name)} == other
        assert ours.pretrained_model_root == "ckpts"


def test_environment_beats_the_file_and_flags_beat_the_environment(tmp_path):
    settings = {"NUM_GPUS": 2, "OUTPUT_DIR": tmp_path / "a b", "MODEL_ROOT": "my model", "LEARNING_RATE": "2e-5",
                "USE_MOVING_KL": "False", "MAX_RESTARTS": 0, "RESUME_FROM_CHECKPOINT": "none", "STOP_GRACE": 45,
                "CONFIG": "configs/tiny_cpu.yaml"}  # fmt: skip
    (words,) = commands("run_post_train.sh", "--learning_rate", "3e-5", **settings)
    found = options(words)
    assert (found["nproc_per_node"], found["max_restarts"], found["config"]) == (
        "2",
        "0",
        "configs/tiny_cpu.yaml",
    )
    assert found["output_dir"] == str(tmp_path / "a b") and found["log_dir"] == str(
        tmp_path / "a b/logs/localhost"
    )
    assert (found["pretrained_model_root"], found["use_moving_KL"]) == ("my model", "False")
    assert (
        found["resume_from_checkpoint"] == "none" and "TORCH_ELASTIC_SHUTDOWN_TIMEOUT=45" in words
    )
    assert [words[i + 1] for i, word in enumerate(words) if word == "--learning_rate"] == [
        "2e-5",
        "3e-5",
    ]
    assert parse(words[words.index("post_train.py") + 1 :]).learning_rate == 3e-5


@pytest.mark.parametrize("flag", [["--output_dir", "elsewhere"], ["--output_dir=elsewhere"]])
def test_the_run_folder_is_the_one_that_training_will_use(flag, tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("seed: 1\noutput_dir: 'out of the file'  # a comment\n")
    assert options(commands(TRAIN, CONFIG=config)[0])["log_dir"] == "out of the file/logs/localhost"
    assert (
        options(commands(TRAIN, CONFIG=config, OUTPUT_DIR="env")[0])["log_dir"]
        == "env/logs/localhost"
    )
    (words,) = commands(TRAIN, *flag, CONFIG=config, OUTPUT_DIR="env")
    assert options(words)["log_dir"] == "elsewhere/logs/localhost"
    assert parse(words[words.index("post_train.py") + 1 :]).output_dir == "elsewhere"
    (words,) = commands(TRAIN, "--config", config)
    assert options(words)["log_dir"] == "out of the file/logs/localhost"


@pytest.mark.parametrize(
    "text",
    [
        '"output_dir": quoted key',
        "{seed: 1, output_dir: flow}",
        "output_dir: >-\n  folded\n  words",
        r'output_dir: "escape \x41"',
        "output_dir: 'hash #1'",
        "output_dir : space",
        "output_dir: 0x10",
        "output_dir: a/../b//c/",
        "output_dir: ~/run",
        "output_dir: $(touch pwned) `x` *",
        "seed: 3",
    ],
)
def test_every_spelling_of_yaml_gives_launcher_and_trainer_the_same_folder(
    text, tmp_path, monkeypatch
):
    config = tmp_path / "mine.yaml"
    config.write_text(text + "\n")
    (words,) = commands(TRAIN, CONFIG=config)
    folder = parse(["--config", str(config)]).output_dir
    assert (
        options(words)["output_dir"] == folder
        and options(words)["log_dir"] == f"{folder}/logs/localhost"
    )
    assert f"SAGE_LAUNCH=localhost:{(ROOT / folder).resolve()}" in words and not folder.startswith(
        "~"
    )


def test_a_file_says_how_its_run_starts(tmp_path):
    config = tmp_path / "mine.yaml"
    config.write_text("resume_from_checkpoint: last_good\n")
    (words,) = commands(TRAIN, CONFIG=config)
    assert (
        "auto" not in words
        and parse(words[words.index("post_train.py") + 1 :]).resume_from_checkpoint == "last_good"
    )
    assert (
        options(commands(TRAIN, CONFIG=config, RESUME_FROM_CHECKPOINT="auto")[0])[
            "resume_from_checkpoint"
        ]
        == "auto"
    )
    for text, sentence in {
        "resume_from_checkpoint: there": "resume_from_checkpoint is there, to which each restart would go back",
        "resume_from_checkpoint: null": "resume_from_checkpoint is none, to which each restart would go back",
        "overwrite: true": "--overwrite would remove the run at each restart",
    }.items():
        config.write_text(text + "\n")
        refused = launch(TRAIN, "--dry_run", CONFIG=config)
        assert refused.returncode == 2 and sentence in refused.stderr
        (words,) = commands(TRAIN, CONFIG=config, MAX_RESTARTS=0)
        assert "--resume_from_checkpoint" not in words


AWKWARD = "a cat, \"two\" 'dogs' $HOME `x` 100% \\ * \n ; é"


@pytest.mark.parametrize("script, settings", [("run_post_train.sh", {}), (PDSH, {"NODES": "a"})])
def test_awkward_words_survive(script, settings):
    (words,) = commands(
        script, *([TRAIN] if script == PDSH else []), "--negative_prompt", AWKWARD, **settings
    )
    assert words[-2:] == ["--negative_prompt", AWKWARD]


def test_every_node_gets_the_same_but_for_its_place():
    first, second = commands("run_post_train_multinode.sh", NODES="alpha, beta", MASTER_PORT=4000)
    assert options(first)["config"] == "configs/hunyuan15_64gpu.yaml"
    assert options(first)["rdzv_endpoint"] == options(second)["rdzv_endpoint"] == "alpha:4000"
    assert (options(first)["nnodes"], options(first)["local_addr"]) == ("2", "alpha")
    assert [word for word in first if word not in second] == [
        f"SAGE_LAUNCH=alpha:{ROOT}/outputs/hunyuan15_64gpu", "is_host=1,join_timeout=1800", "alpha",
        "outputs/hunyuan15_64gpu/logs/alpha"]  # fmt: skip
    assert "is_host=0,join_timeout=1800" in second and len(first) == len(second)
    (words, _) = commands(PDSH, TRAIN, NODES="alpha,beta", MASTER_ADDR="10.0.0.1")
    assert (
        options(words)["rdzv_endpoint"] == "10.0.0.1:29400"
        and options(words)["local_addr"] == "alpha"
    )


@pytest.mark.parametrize(
    "nodes", [slow("a\nb\nc"), slow("a b\tc\n"), slow("a, b,\nc"), "\na\nb, \n\nc\n"]
)
@pytest.mark.parametrize("script", [(PDSH, TRAIN), ("scripts/post_train/slurm.sh",)])
def test_nodes_may_be_lines(nodes, script):
    found = [options(words)["local_addr"] for words in commands(*script, NODES=nodes)]
    assert found == ["a", "b", "c"]


@pytest.mark.parametrize(
    "script, settings, sizes",
    [
        ("run_post_train_multinode.sh", {"NODES": "a,b"}, ("64", "16")),
        ("scripts/post_train/slurm.sh", {"NODES": "a,b"}, ("64", "16")),
        ("run_post_train.sh", {"NUM_GPUS": 4}, ("8", "4")),
        ("run_post_train.sh", {}, None),
        ("run_post_train_multinode.sh", {"NODES": "a,b,c,d,e,f,g,h"}, None),
        ("run_post_train.sh", {"NUM_GPUS": 2, "CONFIG": "configs/tiny_cpu.yaml"}, None),
    ],
)
def test_fewer_gpus_than_the_recipe_was_made_for_are_noted_once(script, settings, sizes):
    result = launch(script, "--dry_run", **settings)
    assert result.returncode == 0
    noted = re.findall(r"^note: .* is made for (\d+) GPUs, and .* are (\d+):", result.stderr, re.M)
    assert noted == ([] if sizes is None else [sizes])


def test_leading_zeros_are_no_octal_number():
    (words,) = commands(TRAIN, NUM_GPUS="08", MAX_RESTARTS="009")
    assert options(words)["nproc_per_node"] == "8"
    assert options(words)["max_restarts"] == "9"


def test_nodes_from_a_file(tmp_path):
    hosts = tmp_path / "hosts"
    hosts.write_text("# my cluster\n\n  alpha slots=4   # the first\nbeta.example.org\tslots=4")
    found = [options(words) for words in commands(PDSH, TRAIN, HOSTFILE=hosts)]
    assert [(each["local_addr"], each["nproc_per_node"]) for each in found] == [
        ("alpha", "4"), ("beta.example.org", "4")]  # fmt: skip
    assert options(commands(PDSH, TRAIN, HOSTFILE=hosts, NUM_GPUS=2)[0])["nproc_per_node"] == "2"


def test_variables_for_the_nodes_are_shown_and_secrets_stay():
    settings = {
        "NODES": "a",
        "NCCL_DEBUG": "INFO x",
        "SAGE_REWARD_TOKEN": "hush",
        "SAGE_reward_token": "hush",
        "SAGE_Passwd": "hush",
        "PASS_ENV": "TMPDIR",
        "TMPDIR": "/t",
    }
    result = launch(PDSH, TRAIN, "--dry_run", **settings)
    assert "export NCCL_DEBUG=INFO\\ x\n" in result.stdout and "export TMPDIR=/t\n" in result.stdout
    assert (
        all(
            f"{name} is not sent" in result.stderr
            for name in ("SAGE_REWARD_TOKEN", "SAGE_reward_token", "SAGE_Passwd")
        )
        and "hush" not in result.stdout + result.stderr
    )


@pytest.mark.parametrize(
    "script, words, settings, sentence",
    [
        (
            "run_post_train.sh",
            (),
            {"NUM_GPUS": "many"},
            "NUM_GPUS is 'many'; a whole number is expected",
        ),
        (
            "run_post_train.sh",
            (),
            {"CONFIG": "none.yaml"},
            "post_train.py: config none.yaml does not exist; there are configs/",
        ),
        (
            TRAIN,
            ("--output_dir", "a\nb"),
            {},
            r"post_train.py: output_dir is 'a\nb'; a path is expected, without",
        ),
        (TRAIN, (), {"NODE_NAME": "a/../b"}, "'a/../b' is not a host name"),
        (
            "run_post_train.sh",
            ("--overwrite",),
            {},
            "--overwrite would remove the run at each restart; remove outputs",
        ),
        (
            TRAIN,
            (),
            {"RESUME_FROM_CHECKPOINT": "c"},
            "resume_from_checkpoint is c, to which each restart would go back",
        ),
        (
            PDSH,
            (TRAIN, "--overwrite"),
            {"NODES": "a", "MAX_RESTARTS": 0},
            "by hand, or set NODE_RESTARTS=0",
        ),
        (
            "scripts/post_train/slurm.sh",
            ("--overwrite",),
            {"NODES": "a", "MAX_RESTARTS": 0},
            "or set REQUEUE=0",
        ),
        (
            TRAIN,
            (),
            {"NNODES": "a[$(touch x)]"},
            "NNODES is 'a[$(touch x)]'; a whole number is expected",
        ),
        (
            TRAIN,
            (),
            {"NNODES": 2},
            "MASTER_ADDR is not set; with 2 nodes it names the one of NODE_RANK 0",
        ),
        (
            TRAIN,
            (),
            {"NNODES": 2, "NODE_RANK": 2, "MASTER_ADDR": "a"},
            "NODE_RANK is 2; with 2 nodes it is at most 1",
        ),
        (TRAIN, (), {"ENV_FILE": "gone"}, "ENV_FILE is 'gone', which cannot be read"),
        (PDSH, (), {"NODES": "a"}, "name the script that the nodes run"),
        (PDSH, ("gone.sh",), {"NODES": "a"}, "script 'gone.sh' is not a file in"),
        (PDSH, (TRAIN,), {}, "no nodes are given; set NODES=a,b,c or HOSTFILE=FILE"),
        (PDSH, (TRAIN,), {"HOSTFILE": "gone"}, "HOSTFILE is 'gone', which cannot be read"),
        (PDSH, (TRAIN,), {"HOSTFILE": "/dev/null"}, "HOSTFILE /dev/null names no node"),
        (PDSH, (TRAIN,), {"NODES": "a,b,a"}, "node a is named twice"),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "n[1-4]"},
            "'n[1-4]' is not a host name; name each node in full",
        ),
        (PDSH, (TRAIN,), {"NODES": "-oProxyCommand=x"}, "'-oProxyCommand=x' is not a host name"),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "a", "PDSH_RCMD_TYPE": "rsh"},
            "PDSH_RCMD_TYPE is 'rsh'; choose ssh or exec",
        ),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "a", "PDSH_RCMD_TYPE": "exec"},
            "set REMOTE_SHELL to what runs a command there",
        ),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "a", "PASS_ENV": "GONE"},
            "PASS_ENV names GONE, which is not set",
        ),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "a", "PASS_ENV": "WANDB_API_KEY", "WANDB_API_KEY": "1"},
            "use ENV_FILE",
        ),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "a", "PASS_ENV": "my_token", "my_token": "1"},
            "use ENV_FILE",
        ),
        (
            PDSH,
            (TRAIN,),
            {"NODES": "a", "PASS_ENV": "x[$(echo>&2)]"},
            "PASS_ENV holds 'x[$(echo>&2)]', which is not the name of a variable",
        ),
        (TRAIN, (), {"NUM_GPUS": "9" * 20}, "a whole number is expected"),
        (
            "scripts/post_train/slurm.sh",
            ("--stop",),
            {"NODES": "a"},
            "--stop is not for jobs of Slurm",
        ),
        (
            "run_inference.sh",
            (),
            {"OUTPUT_DIR": "gone"},
            "gone/checkpoints holds no checkpoint; set CHECKPOINT",
        ),
        ("run_inference.sh", ("--stop",), {}, "--stop is for training"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_wrong_input_is_one_sentence(script, words, settings, sentence):
    result = launch(script, "--dry_run", *words, **settings)
    assert result.returncode == 2 and sentence in result.stderr and not result.stdout
    speaker = (
        "post_train.py"
        if "post_train.py: " in sentence
        else TRAIN
        if script == "run_post_train.sh"
        else script
    )
    assert len(result.stderr.splitlines()) == 1 and result.stderr.startswith(
        f"{speaker.split('/')[-1]}: "
    )


@pytest.mark.parametrize(
    "text, sentence",
    [
        ("a slots=4\nb slots=8\n", "gives nodes different slots"),
        ("a 10.0.0.1\n", "has the line 'a 10.0.0.1'; write HOST"),
    ],
)
def test_odd_host_files_are_refused(tmp_path, text, sentence):
    (tmp_path / "hosts").write_text(text)
    result = launch(PDSH, TRAIN, "--dry_run", HOSTFILE=tmp_path / "hosts")
    assert result.returncode == 2 and sentence in result.stderr


def test_slurm_shows_each_node():
    found = [
        options(words)
        for words in commands("scripts/post_train/slurm.sh", "--seed", "1", NODES="a,b")
    ]
    assert [each["local_addr"] for each in found] == ["a", "b"] and found[1]["seed"] == "1"
    assert found[1]["rdzv_endpoint"] == "a:29400" and found[1]["rdzv_conf"].startswith("is_host=0,")


def test_inference_takes_the_newest_checkpoint_and_the_model_of_the_run(tmp_path):
    for name in ("step-000900", "step-001000", "step-001100.tmp", "step-x\n/step-9", "step-1 2"):
        (tmp_path / "checkpoints" / name).mkdir(parents=True)
    (tmp_path / "config.yaml").write_text(
        "{pretrained_model_root: my/model, pretrained_transformer_version: 720p_t2v}"
    )
    settings = {"OUTPUT_DIR": tmp_path, "PROMPT": "two words"}
    result = launch("run_inference.sh", "--dry_run", "--seed", "7", **settings)
    line = result.stdout.splitlines()[-1]
    assert (
        "generate.py --model_path my/model --pretrained_transformer_version 720p_t2v --checkpoint_path"
        in line
    )
    assert (
        f"{tmp_path}/checkpoints/step-001000 --prompt two\\ words --seed 7" in line
        and "distributed" not in line
    )
    line = launch(
        "run_inference.sh", "--dry_run", NUM_GPUS=4, CHECKPOINT="c", **settings
    ).stdout.splitlines()[-1]
    assert (
        "-m torch.distributed.run --standalone --nproc_per_node 4 generate.py" in line
        and "--checkpoint_path c" in line
    )


def test_generation_follows_no_links_of_a_run(tmp_path):
    checkpoints = tmp_path / "run" / "checkpoints"
    (checkpoints / "step-000001").mkdir(parents=True)
    (tmp_path / "elsewhere").mkdir()
    (checkpoints / "step-000002").symlink_to(tmp_path / "elsewhere")
    settings = {"OUTPUT_DIR": tmp_path / "run", "PROMPT": "a cat"}
    result = launch("run_inference.sh", "--dry_run", **settings)
    assert "/step-000001 " in result.stdout and "step-000002" not in result.stdout

    (tmp_path / "mine.yaml").write_text("seed: 1\n")
    (tmp_path / "run" / "config.yaml").symlink_to(tmp_path / "mine.yaml")
    result = launch("run_inference.sh", "--dry_run", **settings)
    assert result.returncode == 2 and "config.yaml is a link" in result.stderr


@pytest.mark.slow
@pytest.mark.skipif(not shutil.which("shellcheck"), reason="install shellcheck")
def test_shellcheck_finds_nothing():
    """What the dry runs do not reach: every branch of every script."""
    folders = (".", "research/benchmarks", "scripts", "scripts/*")
    scripts = [
        ROOT / ".ci" / "run",
        *(file for folder in folders for file in ROOT.glob(f"{folder}/*.sh")),
    ]
    checked = subprocess.run(
        ["shellcheck", "-x", *scripts], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert checked.returncode == 0 and len(scripts) > 8, checked.stdout
