"""Flags, YAML and the command line; and that no flag is without effect."""

import ast
import dataclasses
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml

from sage_grpo.algo import grpo, sde, solver, trust_region
from sage_grpo.config import fields as config_module
from sage_grpo.config import parse as flags
from sage_grpo.config import rules
from sage_grpo.config.fields import FIELDS, Config, ConfigError, resolve
from sage_grpo.config.parse import RETIRED, base_type, from_values, parse
from sage_grpo.config.rules import check, warnings
from sage_grpo.models.backbone import Sampling
from sage_grpo.train import update

ROOT = Path(__file__).parents[2]
SAMPLING = Sampling(frames=9, height=32, width=48, fps=8, shift=3.0, guidance=2.0, num_steps=20)
BACKBONE = SimpleNamespace(
    sampling=SAMPLING,
    rollout_size=(5, 16, 24),
    lora_targets=("to_q", "to_k"),
    negative_prompt="dull",
)


def test_no_arguments_give_the_defaults():
    assert parse([]) == Config()


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "eta: 0.7\nlearning_rate: 1e-4\nuse_lora: true\ntrain_prompts: [a.txt, b.txt]\n"
    )
    config = parse(["--config", str(file), "--eta", "0.9", "--reward_weights", '{"VQ": 1}'])
    assert (config.eta, config.learning_rate, config.use_lora) == (0.9, 1e-4, True)
    assert config.train_prompts == ("a.txt", "b.txt") and config.reward_weights == {"VQ": 1}
    assert config.num_sampling_steps == Config().num_sampling_steps


@pytest.mark.parametrize("words, value", [(["--enable_gradient_checkpointing"], True), (["--use_lora", "True"], True),
                                          (["--use_lora", "False"], False), (["--use_lora=true"], True)])  # fmt: skip
def test_booleans(words, value):
    name = words[0].removeprefix("--").split("=")[0]
    assert getattr(parse(words), name) is value


def test_aliases():
    assert parse(["--train_video_csv", "x.csv"]).train_prompts == ("x.csv",)
    assert from_values({"valid_video_csv": "x.csv"}).validation_prompts == ("x.csv",)
    with pytest.raises(ConfigError, match="mean the same"):
        from_values({"train_video_csv": "x.csv", "train_prompts": "y.csv"})


def test_retired_flags_of_published_commands_are_accepted(tmp_path):
    assert set(RETIRED) == {"kl_compute_mode", "lora_dropout"} and not set(RETIRED) & set(FIELDS)
    for zero in ("0", "0.0", "0.00"):
        assert parse(["--kl_compute_mode", "rollout_phase", "--lora_dropout", zero]) == Config()
    file = tmp_path / "c.yaml"
    file.write_text("kl_compute_mode: rollout_phase\nlora_dropout: 0.0\neta: 0.7\n")
    assert parse(["--config", str(file)]) == Config(eta=0.7)
    file.write_text("lora_dropout: 0.1\n")
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.1; only 0\.0 is possible"):
        parse(["--config", str(file)])


def test_what_is_written_is_read_back(tmp_path):
    config = parse(
        [
            "--eta",
            "0.25",
            "--train_prompts",
            "a",
            "b",
            "--reward_model",
            "shapes",
            "--kl_weight",
            "3e-7",
        ]
    )
    file = tmp_path / "config.yaml"
    file.write_text(config.to_yaml())
    assert parse(["--config", str(file)]) == config


@pytest.mark.parametrize(
    "arguments, words",
    [
        ("--eat 1", "unknown flag --eat; did you mean --eta"),
        ("--zzzz", "unknown flag --zzzz; --help lists them all"),
        ("--eta x", "eta is 'x'; a number is expected"),
        ("--eta 0", "eta is 0.0; it must be above 0"),
        ("--eta inf", "must be finite"),
        ("--kl_target 0", "kl_target is 0.0; it must be above 0"),
        ("--kl_warmup_steps -1", "kl_warmup_steps is -1; it must be at least 0"),
        ("--dual_kl_step_weight -0.1", "dual_kl_step_weight is -0.1; it must be at least 0"),
        ("--sde_type ode", "sde_type is 'ode'; choose one of sage_grpo"),
        ("--use_lora maybe", "use_lora is 'maybe'; it must be True or False"),
        ("--max_steps 1.5", "a whole number is expected"),
        ("--timestep_fraction 1.2", "it must be above 0 and at most 1"),
        (
            "--lora_dropout 0.1",
            "lora_dropout is '0.1'; only 0.0 is possible: dropout would make the first ratio",
        ),
        ("--lora_dropout x", "lora_dropout is 'x'; only 0.0 is possible"),
        (
            "--kl_compute_mode update_phase",
            "kl_compute_mode is 'update_phase'; only rollout_phase is possible",
        ),
        ("--reward_weights [1]", "a JSON object is expected"),
        ("--reward_weights {", "reward_weights is '{'"),
        ("--seed", "expected one argument"),
        ("--config missing.yaml", "config missing.yaml does not exist; there are configs/"),
        ("--max_steps none", "max_steps is 'none'"),
        ("stray", "unknown flag stray"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments, words):
    with pytest.raises(ConfigError) as caught:
        parse(arguments.split())
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("text", ["- a\n- b\n", "eta: [1, 2]\n", "eta:\n", "etta: 1\n", "a: b: c\n", "1: 2\n",
                                  "eta: true\n", "seed: yes\n", "seed: !!int ''\n", "seed: 2000-99-99\n",
                                  "seed: !!timestamp x\n", "[" * 100000, "a: " + "{a: " * 50000,
                                  '"a\\nb": 1\n', "eta: \0\n",
                                  f"seed: {2**63}\n", "batch_size: 1000000000\n", "reward_weights: '" + "[" * 99999
                                  + "'\n"])  # fmt: skip
def test_a_wrong_file_is_one_sentence(tmp_path, text):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)])
    assert "\n" not in str(caught.value)


def test_a_file_cannot_unfold_into_gigabytes(tmp_path):
    file = tmp_path / "c.yaml"
    lines = [
        "reward_weights:",
        "  a0: &a0 [x, x]",
        *(f"  a{i}: &a{i} [*a{i - 1}, *a{i - 1}]" for i in range(1, 60)),
    ]
    file.write_text("\n".join(lines))
    with pytest.raises(ConfigError, match=r"c\.yaml repeats a value by an alias .*; write it out"):
        parse(["--config", str(file)])


@pytest.mark.parametrize("text, words", [
    ("eta: 0.5\nseed: 1\neta: 0.7\n", "the key 'eta' in lines 1 and 3"),
    ("{eta: 0.5, eta: 0.5}", "the key 'eta' in lines 1 and 1"),
    ('eta: 1\n"eta": 2\n', "the key 'eta' in lines 1 and 2"),
    ("reward_weights:\n  VQ: 1\n  VQ: 2\n", "the key 'VQ' in lines 2 and 3"),
    ("report_to: [{a: 1, a: 2}]\n", "the key 'a' in lines 1 and 1"),
])  # fmt: skip
def test_a_key_is_written_once(tmp_path, text, words):
    file = tmp_path / "c.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"c\.yaml has {words}.*; keep one of them"):
        parse(["--config", str(file)])


def test_the_same_key_in_two_mappings_is_not_twice(tmp_path):
    weights = {"videoalign": {"TA": 1.0}, "ocr": {"TA": 2.0}}
    (tmp_path / "c.yaml").write_text(yaml.safe_dump({"reward_weights": weights}))
    assert parse(["--config", str(tmp_path / "c.yaml")]).reward_weights == weights


HOSTS = {  # of the environment, with the address in the file
    ("", "http://there:8900"): False,
    ("there", "http://there:8900"): True,
    ("THERE:8900", "http://there:8900/"): True,
    ("there:8900", "https://there"): False,
    ("there:8901", "http://there:8900"): False,
    ("elsewhere, there:8900", "https://there:8900"): True,
    ("there", "http://there.evil:8900"): False,
    ("there", "http://there@evil:8900"): False,
    ("there", "http://evil:8900/?there"): False,
    ("there", "http://evil\\@there"): False,
    ("127.0.0.1", "http://localhost:8900"): False,
    ("[::1]:8900", "http://[::1]:8900"): True,
}


@pytest.mark.parametrize(
    "hosts, url, allowed", [(*case, allowed) for case, allowed in HOSTS.items()]
)
def test_a_file_alone_does_not_choose_where_the_token_goes(
    tmp_path, monkeypatch, hosts, url, allowed
):
    (tmp_path / "c.yaml").write_text(
        yaml.safe_dump({"reward_model": "remote", "remote_reward_url": url})
    )
    arguments = ["--config", str(tmp_path / "c.yaml")]
    monkeypatch.delenv("SAGE_REWARD_TOKEN", raising=False)
    assert parse(arguments).remote_reward_url == url  # nothing to send
    monkeypatch.setenv("SAGE_REWARD_TOKEN", "hush-hush-hush-hush")
    monkeypatch.setenv("SAGE_REWARD_HOSTS", hosts)
    assert parse([*arguments, "--remote_reward_url", url]).remote_reward_url == url
    if allowed:
        assert parse(arguments).remote_reward_url == url
        return
    with pytest.raises(
        ConfigError, match=r"only config .*c\.yaml names .*; give --remote_reward_url"
    ) as caught:
        parse(arguments)
    assert "or set SAGE_REWARD_HOSTS=" in str(caught.value) and "hush" not in str(caught.value)


@pytest.mark.parametrize("value", ["a\nb", "a\x7f", "\x1b[2J", "", "-rf", "a\udc80", "a\0b"])
@pytest.mark.parametrize("name", flags.PATHS)
def test_a_path_has_no_control_characters(name, value):
    with pytest.raises(ConfigError, match=f"{name} is .*; a (path|list of words) is expected"):
        from_values({name: value})


def test_every_flag_for_a_file_or_folder_is_a_path():
    named = {
        name
        for name in FIELDS
        if name.endswith(("_dir", "_root", "_path", "_cache", "_prompts", "_checkpoint", "_rubric"))
    }
    assert named - {"num_validation_prompts"} == set(flags.PATHS)


def test_a_home_folder_is_the_users(monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    config = from_values(
        {"output_dir": "~/run", "train_prompts": ["~/a.txt", "b~.txt"], "negative_prompt": "~"}
    )
    assert (config.output_dir, config.train_prompts) == (
        "/home/me/run",
        ("/home/me/a.txt", "b~.txt"),
    )
    assert config.negative_prompt == "~"


def printed(capsysbinary, *words):
    with pytest.raises(SystemExit) as stop:
        parse([*words])
    assert stop.value.code == 0
    return capsysbinary.readouterr().out


def test_the_configuration_can_be_printed(tmp_path, capsysbinary):
    file = tmp_path / "c.yaml"
    file.write_text("output_dir: 'two words é'\nseed: 7\n")
    words = ["--config", str(file), "--seed", "9", "--use_lora", "--print_config"]
    values = json.loads(printed(capsysbinary, *words))
    assert values.pop("config") == str(file) and values.pop("given") == [
        "output_dir",
        "seed",
        "use_lora",
    ]
    config = parse(words[:-1])
    assert values == json.loads(json.dumps(dataclasses.asdict(config))) and config.seed == 9
    names = ["output_dir", "seed", "use_lora", "prompt_cache", "config"]
    assert printed(capsysbinary, *words, *names).decode().split("\0") == [
        "two words é", "9", "true", "", str(file), ""
    ]  # fmt: skip
    with pytest.raises(ConfigError, match="unknown flag outptu_dir; did you mean output_dir"):
        parse([*words, "outptu_dir"])


@pytest.mark.parametrize("name", [name for name in FIELDS if base_type(name) in (int, float)])
def test_a_number_beyond_all_use_is_refused(name):
    value = {int: 2**62, float: 1e300}[base_type(name)]
    if name in ("seed", "validation_global_seed"):
        assert getattr(from_values({name: value}), name) == value
        return
    with pytest.raises(ConfigError, match=rf"^{name} is .*; it must be .*at most \d"):
        from_values({name: value})


def test_what_a_terminal_would_obey_is_escaped():
    with pytest.raises(ConfigError) as caught:
        from_values({"\x1b[2J\n": 1})
    assert str(caught.value) == r"unknown key \x1b[2J\n; --help lists them all"


GRAPHS = {"batch_size": 4, "cuda_graphs": True, "guidance_scale": 1.0}


@pytest.mark.parametrize(
    "values, ranks, words",
    [
        ({"batch_size": 2, "num_generations": 4}, 1, "nearest batch_size is 4 or 8"),
        ({"batch_size": 3, "num_generations": 4}, 2, "nearest batch_size is 2 or 4"),
        ({"batch_size": 4, "micro_batch_size": 3}, 1, "must divide the 4 videos"),
        ({"batch_size": 8, "micro_batch_size": 8}, 1, "must divide the 4 videos"),
        (
            {"batch_size": 8, "prompts_per_forward": 2, "enable_fsdp": True},
            1,
            "prompts_per_forward is above 1",
        ),
        (
            {"batch_size": 4, "algorithm": "awm", "same_init_noise": True},
            1,
            "explores by the first noise alone: set same_init_noise False",
        ),
        (
            {"batch_size": 4, "sde_window": "random:2", "enable_fsdp": True},
            1,
            "or take random_iteration",
        ),
        ({"batch_size": 4, "cuda_graphs": True}, 1, "cuda_graphs needs guidance_scale 1"),
        (GRAPHS | {"guidance_scale": 2.0}, 1, "cuda_graphs needs guidance_scale 1"),
        (GRAPHS | {"sp_size": 2}, 2, "cuda_graphs needs guidance_scale 1, sp_size 1"),
        (GRAPHS | {"compile": True}, 1, "compile False"),
        (GRAPHS | {"enable_fsdp": True}, 1, "enable_fsdp False"),
        (GRAPHS | {"outside_window": "fp8", "sde_window": "random:2"}, 1, "outside_window exact"),
        (
            {"batch_size": 4, "updates_per_rollout": 2, "gradient_accumulation_steps": 2},
            1,
            "one of them must be 1",
        ),
        (
            {"batch_size": 4, "gradient_accumulation_steps": 3},
            1,
            "max_steps is 10000; it must be a multiple",
        ),
        (
            {"batch_size": 4, "gradient_accumulation_steps": 2, "save_interval": 3},
            1,
            "save_interval is 3",
        ),
        (
            {"batch_size": 4, "gradient_accumulation_steps": 2, "validation_interval": 3},
            1,
            "validation_interval is 3",
        ),
        ({"batch_size": 4, "kl_coef": 1.0}, 1, "kl_coef is 1.0"),
        (
            {"batch_size": 4, "use_dual_kl": False, "dual_kl_moving_weight": 0},
            1,
            "both KL terms weigh 0",
        ),
        ({"batch_size": 4, "pretrained_lora_path": "x"}, 1, "needs use_lora"),
        ({"batch_size": 4, "report_to": "excel"}, 1, "report_to names excel"),
        (
            {"batch_size": 4, "report_to": "wandb"},
            1,
            "wandb, which is not installed: pip install wandb",
        ),
        (
            {"batch_size": 4, "dtype": "bf16"},
            1,
            "bf16 with master_weight_type fp32 needs enable_fsdp",
        ),
        ({"batch_size": 2, "sp_size": 2}, 2, "batch_size is 2 on 1 data-parallel rank"),
    ],
)
def test_flags_that_do_not_go_together(values, ranks, words):
    with pytest.raises(ConfigError, match=words):
        check(from_values(values), ranks)


def test_a_small_model_may_have_cuda_graphs():
    check(from_values(GRAPHS))


def test_videos_without_ffmpeg_are_refused_before_a_run_makes_any(monkeypatch):
    monkeypatch.setattr(rules, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="pip install imageio-ffmpeg, or set validation_videos 0"):
        check(from_values({"batch_size": 4, "report_to": "none"}))
    check(from_values({"batch_size": 4, "report_to": "none", "validation_videos": 0}))


@pytest.mark.parametrize(
    "batch, group, ranks", [(4, 4, 1), (2, 4, 2), (8, 4, 1), (2, 4, 32), (4, 2, 3), (1, 4, 4)]
)
def test_batches_of_whole_groups_pass(batch, group, ranks):
    check(from_values({"batch_size": batch, "num_generations": group}), ranks)


def test_the_model_fills_in_what_was_not_said():
    """Rollouts are smaller than what the model is meant for; validation takes the latter, whatever the rollout has."""
    config = resolve(from_values({"height": 64, "timestep_shift": 7.0}), BACKBONE, "cpu")
    assert (config.num_frames, config.height, config.width, config.fps) == (5, 64, 24, 8)
    assert (config.timestep_shift, config.guidance_scale, config.dtype) == (7.0, 2.0, "fp32")
    assert (config.validate_video_length, config.validation_fixed_size) == (9, "32x48")
    assert (config.validation_num_inference_steps, config.validation_timestep_shift) == (20, 3.0)
    assert config.lora_target_modules == ("to_q", "to_k") and config.negative_prompt == "dull"
    assert resolve(from_values({"negative_prompt": ""}), BACKBONE, "cpu").negative_prompt == ""
    assert resolve(Config(), BACKBONE, "cuda").dtype == "bf16"
    assert resolve(
        from_values({"lora_target_modules": "to_v"}), BACKBONE, "cpu"
    ).lora_target_modules == ("to_v",)


def test_settings_that_do_less_than_they_seem_to_are_pointed_out():
    assert not list(warnings(Config(), 1))
    (found,) = warnings(from_values({"tail_steps": 3}), 1)
    assert found == "tail_steps is 3, but sde_window all leaves no steps to make cheaper"
    assert not list(
        warnings(from_values({"tail_steps": 3, "algorithm": "awm"}), 1)
    )  # all of its steps are the tail
    (found,) = warnings(from_values({"outside_window": "fp8", "sde_window": "all_but_last"}), 1)
    assert found.startswith("outside_window is fp8, but sde_window all_but_last leaves no steps")
    assert not list(warnings(from_values({"tail_steps": 3, "sde_window": "random:2"}), 1))
    recipe = from_values({"gpus": 8, "sp_size": 2, "batch_size": 4})
    assert not list(warnings(recipe, 8))
    (found,) = warnings(recipe, 2)
    assert (
        found == "it is meant for 8 rank(s) and there are 2: an iteration has 4 clips instead of 16"
    )


def test_a_malformed_file_is_told_by_line_and_column(tmp_path):
    (tmp_path / "c.yaml").write_text("eta: [1\nseed: 2\n")
    with pytest.raises(
        ConfigError, match=r"c\.yaml cannot be read in line 2, column 5: expected ',' or '\]'"
    ):
        parse(["--config", str(tmp_path / "c.yaml")])


def reads(path):
    """Names of attributes and strings in a file: `config.eta`, or "eta" in a list that getattr walks through."""
    tree = ast.parse(path.read_text())
    attributes = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    return attributes | {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant)}


def test_every_flag_is_read_somewhere():
    files = [*(ROOT / "sage_grpo").rglob("*.py"), ROOT / "post_train.py"]
    used = set().union(*(reads(file) for file in files if file.parent.name != "config"))
    own = ast.parse((ROOT / "sage_grpo" / "config" / "fields.py").read_text())
    functions = [node for node in ast.walk(own) if isinstance(node, ast.FunctionDef)]
    used |= {n.attr for f in functions for n in ast.walk(f) if isinstance(n, ast.Attribute)}
    used |= {n.value for f in functions for n in ast.walk(f) if isinstance(n, ast.Constant)}
    assert not sorted(set(FIELDS) - used)


def test_hyphens_and_underscores_mean_the_same_in_a_flag():
    words = [
        "--learning-rate",
        "1e-3",
        "--train-prompts=my-file.txt",
        "--negative_prompt",
        "well-lit --not-a-flag",
    ]
    config = parse(words)
    assert (config.learning_rate, config.train_prompts) == (1e-3, ("my-file.txt",))
    assert config.negative_prompt == "well-lit --not-a-flag"


def test_choices_are_those_of_the_maths():
    """Written down a second time, because `--help` does not wait for torch."""
    assert set(config_module.SDE_TYPES) == sde.SDES.keys() - {"ode"}  # which explores nothing
    assert config_module.ADVANTAGE_STDS == grpo.ADVANTAGE_STDS
    assert config_module.KL_SCHEDULES == trust_region.SCHEDULES
    assert tuple(trust_region.FEEDBACKS) == config_module.KL_FEEDBACKS
    assert config_module.KL_ESTIMATORS == trust_region.ESTIMATORS
    assert config_module.SOLVERS == solver.SOLVERS
    assert tuple(update.ALGORITHMS) == config_module.ALGORITHMS
    flags = (
        "sde_type",
        "advantage_std",
        "kl_schedule",
        "kl_feedback",
        "step_kl_estimator",
        "validation_solver",
    )
    flags += ("algorithm",)
    names = (
        "SDE_TYPES",
        "ADVANTAGE_STDS",
        "KL_SCHEDULES",
        "KL_FEEDBACKS",
        "KL_ESTIMATORS",
        "SOLVERS",
        "ALGORITHMS",
    )
    for flag, name in zip(flags, names, strict=True):
        assert FIELDS[flag].metadata["choices"] == getattr(config_module, name)


@pytest.mark.parametrize(
    "values, words",
    [
        ({"reward_model": "remote"}, "the reward remote needs .* remote_reward_url"),
        ({"holdout_reward": "remote"}, "the reward remote needs .* remote_reward_url"),
        (
            {"remote_reward_url": "http://there:8900"},
            "no reward_model or holdout_reward is remote or judge",
        ),
        ({"stop_on_hacking": True}, "stop_on_hacking is True, .* give holdout_reward"),
    ],
)
def test_rewards_that_lack_something_are_refused(values, words):
    with pytest.raises(ConfigError, match=words):
        check(from_values({"batch_size": 4, "enable_fsdp": True} | values))
    complete = {"reward_model": "remote", "remote_reward_url": "http://there:8900"}
    complete |= {"holdout_reward": "pickscore", "stop_on_hacking": True}
    check(from_values({"batch_size": 4, "enable_fsdp": True} | complete))
