"""A configuration from a YAML file and a command line."""

import dataclasses
import json

import pytest
import yaml

from sage_grpo.config.fields import FIELDS, Config, ConfigError
from sage_grpo.config.parse import RETIRED, from_values, parse


def test_no_arguments_give_the_defaults():
    assert parse([]) == Config()


def test_a_flag_beats_the_file_and_the_file_beats_the_default(tmp_path):
    file = tmp_path / "c.yaml"
    file.write_text(
        "eta: 0.7\nlearning_rate: 1e-4\nuse_lora: true\ntrain_prompts: [a.txt, b.txt]\n"
    )
    config = parse(["--config", str(file), "--eta", "0.9", "--reward_weights", '{"VQ": 1}'])
    assert (config.eta, config.learning_rate, config.use_lora) == (0.9, 1e-4, True)
    assert config.train_prompts == ("a.txt", "b.txt")
    assert config.reward_weights == {"VQ": 1}
    assert config.num_sampling_steps == Config().num_sampling_steps


@pytest.mark.parametrize(
    "arguments, value",
    [
        ("--use_lora", True),
        ("--use_lora True", True),
        ("--use_lora False", False),
        ("--use_lora=true", True),
    ],
)
def test_booleans(arguments, value):
    assert parse(arguments.split()).use_lora is value


def test_aliases():
    assert parse(["--train_video_csv", "x.csv"]).train_prompts == ("x.csv",)
    assert from_values({"valid_video_csv": "x.csv"}).validation_prompts == ("x.csv",)
    with pytest.raises(ConfigError, match="mean the same"):
        from_values({"train_video_csv": "x.csv", "train_prompts": "y.csv"})


def test_retired_flags_of_published_commands_are_accepted(tmp_path):
    assert set(RETIRED) == {"kl_compute_mode", "lora_dropout"}
    assert not set(RETIRED) & set(FIELDS)
    for zero in ("0", "0.0", "0.00"):
        assert parse(["--kl_compute_mode", "rollout_phase", "--lora_dropout", zero]) == Config()
    file = tmp_path / "c.yaml"
    file.write_text("kl_compute_mode: rollout_phase\nlora_dropout: 0.0\neta: 0.7\n")
    assert parse(["--config", str(file)]) == Config(eta=0.7)
    file.write_text("lora_dropout: 0.1\n")
    with pytest.raises(ConfigError, match=r"lora_dropout is 0\.1; only 0\.0 is possible"):
        parse(["--config", str(file)])


def test_what_is_written_is_read_back(tmp_path):
    arguments = "--eta 0.25 --train_prompts a b --reward_model shapes --kl_weight 3e-7"
    config = parse(arguments.split())
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
        ("--max_steps none", "max_steps is 'none'"),
        ("stray", "unknown flag stray"),
    ],
)
def test_a_wrong_flag_is_one_sentence(arguments, words):
    with pytest.raises(ConfigError) as caught:
        parse(arguments.split())
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "hosts, url, allowed",
    [
        ("", "http://there:8900", False),
        ("there", "http://there:8900", True),
        ("THERE:8900", "http://there:8900/", True),
        ("there:8900", "https://there", False),
        ("there:8901", "http://there:8900", False),
        ("elsewhere, there:8900", "https://there:8900", True),
        ("there", "http://there.evil:8900", False),
        ("there", "http://there@evil:8900", False),
        ("there", "http://evil:8900/?there", False),
        ("there", "http://evil\\@there", False),
        ("127.0.0.1", "http://localhost:8900", False),
        ("[::1]:8900", "http://[::1]:8900", True),
    ],
)
def test_a_file_alone_does_not_choose_where_the_token_goes(
    tmp_path, monkeypatch, hosts, url, allowed
):
    file = tmp_path / "c.yaml"
    file.write_text(yaml.safe_dump({"reward_model": "remote", "remote_reward_url": url}))
    arguments = ["--config", str(file)]

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
    assert "or set SAGE_REWARD_HOSTS=" in str(caught.value)
    assert "hush" not in str(caught.value)


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
    assert values.pop("config") == str(file)
    assert values.pop("given") == ["output_dir", "seed", "use_lora"]
    config = parse(words[:-1])
    assert config.seed == 9
    assert values == json.loads(json.dumps(dataclasses.asdict(config)))

    names = ["output_dir", "seed", "use_lora", "prompt_cache", "config"]
    shell_words = printed(capsysbinary, *words, *names).decode().split("\0")
    assert shell_words == ["two words é", "9", "true", "", str(file), ""]
    with pytest.raises(ConfigError, match="unknown flag outptu_dir; did you mean output_dir"):
        parse([*words, "outptu_dir"])


def test_what_a_terminal_would_obey_is_escaped():
    with pytest.raises(ConfigError) as caught:
        from_values({"\x1b[2J\n": 1})
    assert str(caught.value) == r"unknown key \x1b[2J\n; --help lists them all"
