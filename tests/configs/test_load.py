from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from configs.errors import ConfigError, UserError
from configs.load import config_digest, load_config, save_config
from configs.schema import RLConfig, RunConfig

REPOSITORY = Path(__file__).parents[2]


def write(folder: Path, text: str) -> Path:
    path = folder / "run.yaml"
    path.write_text(text)
    return path


def mistake(folder: Path, text: str, *overrides: str) -> str:
    """The message about a bad config, with the file's own path taken out."""
    path = write(folder, text)
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    return str(caught.value).replace(str(path), "FILE")


# --- what a good config becomes


def test_an_empty_file_gives_the_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "")) == RunConfig()


def test_a_heading_without_fields_gives_that_sections_defaults(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "rl:\n  # kl_coef: 0.1\nseed: 3\n")) == RunConfig(seed=3)


def test_overrides_win_over_the_file_and_later_ones_over_earlier(tmp_path: Path) -> None:
    path = write(tmp_path, "rl:\n  group_size: 4\n  epochs: 2\n")
    config = load_config(path, ["rl.group_size=6", "seed=1", "rl.group_size=16"])
    assert config == RunConfig(seed=1, rl=RLConfig(group_size=16, epochs=2))


def test_overrides_are_read_as_yaml_values(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    config = load_config(path, ["train.lr=3e-4", "runtime.fallback=false", "agent.max_actions=2", "resume=auto"])
    assert (config.train.lr, config.runtime.fallback, config.agent.max_actions) == (0.0003, False, 2)
    assert config.resume == "auto"


def test_text_overrides_are_taken_as_they_are_unless_quoted(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    overrides = ["run_dir=2026", "agent.system_prompt=Walk: # {slowly}", "model.path='a b'"]
    config = load_config(path, overrides)
    assert (config.run_dir, config.agent.system_prompt, config.model.path) == ("2026", "Walk: # {slowly}", "a b")


def test_an_override_may_hold_an_equals_sign_or_be_empty(tmp_path: Path) -> None:
    config = load_config(write(tmp_path, ""), ["run_dir=runs/lr=3", "agent.instruction_template="])
    assert (config.run_dir, config.agent.instruction_template) == ("runs/lr=3", "")


def test_environment_options_may_be_nested_and_named_freely(tmp_path: Path) -> None:
    path = write(tmp_path, "env:\n  options:\n    image_size: 32\n    tasks: [goto, follow]\n")
    config = load_config(path, ["env.options.image_size=64", "env.options.light.strength=1e-3"])
    assert config.env.options == {"image_size": 64, "tasks": ["goto", "follow"], "light": {"strength": 0.001}}


@pytest.mark.parametrize("written", ["1e-6", '"1e-6"', "1.0e-6", "0.000001", "1E-6", "'0.000001'"])
def test_a_float_may_be_written_in_any_usual_way(tmp_path: Path, written: str) -> None:
    assert load_config(write(tmp_path, f"train:\n  lr: {written}\n")).train.lr == 0.000001


@pytest.mark.parametrize("written", ["10", "010", "1_0", "0xA", '"10"', "10.0", "1e1", "+10"])
def test_an_integer_is_never_octal_or_in_base_60(tmp_path: Path, written: str) -> None:
    path = write(tmp_path, f"steps: {written}\nenv:\n  options: {{zip: 010, at: 1:30, part: -.5}}\n")
    config = load_config(path, [f"rl.group_size={written}"])
    assert (config.steps, config.rl.group_size) == (10, 10)
    assert config.env.options == {"zip": 10, "at": "1:30", "part": -0.5}


def test_an_override_adds_a_reward_to_the_default_ones(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, ""), ["reward.weights.format=0.2"]).reward.weights == {
        "answer": 1.0,
        "format": 0.2,
    }
    path = write(tmp_path, "reward:\n  weights: {exact: 1}\n")
    assert load_config(path, ["reward.weights.format=0.2"]).reward.weights == {"exact": 1.0, "format": 0.2}


def test_dates_stay_text_so_that_configs_hold_plain_values(tmp_path: Path) -> None:
    assert load_config(write(tmp_path, "run_dir: 2026-11-29\n")).run_dir == "2026-11-29"


def test_every_yaml_file_in_configs_loads() -> None:
    paths = sorted((REPOSITORY / "configs").glob("*.yaml"))
    assert [path.name for path in paths if path.name == "demo.yaml"] == ["demo.yaml"]
    for path in paths:
        load_config(path)


# --- what a bad one says


def test_a_mistyped_key_is_refused_with_its_place_and_the_nearest_name(tmp_path: Path) -> None:
    assert mistake(tmp_path, "seed: 1\nrl:\n  kl_coeff: 0.1\n") == (
        "FILE, line 3: rl.kl_coeff: unknown key. Did you mean rl.kl_coef?"
    )
    assert mistake(tmp_path, "", "rl.kl_coeff=0.1") == (
        "command line: rl.kl_coeff: unknown key. Did you mean rl.kl_coef?"
    )


def test_a_mistyped_section_is_refused_with_the_nearest_name(tmp_path: Path) -> None:
    assert mistake(tmp_path, "", "rolout.max_tokens=3") == "command line: rolout: unknown key. Did you mean rollout?"
    assert mistake(tmp_path, "", "RL.kl_coef=1") == "command line: RL: unknown key. Did you mean rl?"


def test_a_section_like_no_other_is_refused_with_where_its_fields_are(tmp_path: Path) -> None:
    assert mistake(tmp_path, "", "grpo.kl_coef=1") == "command line: grpo: unknown key. Did you mean rl.kl_coef?"


def test_a_dotted_key_in_a_file_is_refused_with_how_to_nest_it(tmp_path: Path) -> None:
    assert mistake(tmp_path, "rl.group_size: 4\n") == (
        "FILE, line 1: rl.group_size: unknown key. "
        "Write it as two lines, `rl:` and, indented below it, `group_size: ...`."
    )


def test_a_key_in_the_wrong_section_is_refused_with_the_right_ones(tmp_path: Path) -> None:
    assert mistake(tmp_path, "lr: 0.1\n") == "FILE, line 1: lr: unknown key. Did you mean train.lr or imitation.lr?"
    assert mistake(tmp_path, "", "rl.max_tokens=4") == (
        "command line: rl.max_tokens: unknown key. Did you mean rollout.max_tokens?"
    )


def test_a_key_like_no_other_is_refused_with_the_names_there_are(tmp_path: Path) -> None:
    assert mistake(tmp_path, "", "model.quux=1") == "command line: model.quux: unknown key. Known here: path, dtype."


@pytest.mark.parametrize(
    ("override", "explanation"),
    [
        ("rl.group_size=-1", "rl.group_size: -1, expected an integer >= 2."),
        ("rl.group_size=1", "rl.group_size: 1, expected an integer >= 2."),
        ("rl.clip_low=1", "rl.clip_low: 1, expected a number > 0 and < 1."),
        ("train.lr=fast", "train.lr: 'fast', expected a number > 0."),
        ("train.lr=.nan", "train.lr: nan, expected a finite number > 0."),
        ("train.lr=.inf", "train.lr: inf, expected a finite number > 0."),
        ("train.lr=1e999", "train.lr: inf, expected a finite number > 0."),
        ("train.lr=inf", "train.lr: 'inf', expected a finite number > 0."),
        ("rl.kl_coef=.inf", "rl.kl_coef: inf, expected a finite number >= 0."),
        ("rollout.temperature=.inf", "rollout.temperature: inf, expected a finite number > 0."),
        ("env.step_timeout_s=.inf", "env.step_timeout_s: inf, expected a finite number > 0."),
        ("train.lr=1,0", "train.lr: '1,0', expected a number > 0."),
        ("train.lr=null", "train.lr: no value, expected a number > 0."),
        ("rl.group_size=[8]", "rl.group_size: [8], expected an integer >= 2."),
        ("rl.group_size=1:30", "rl.group_size: '1:30', expected an integer >= 2."),
        ("runtime.kv_cache_bytes=8GiB", "runtime.kv_cache_bytes: '8GiB', expected an integer > 0."),
        ("runtime.zero_stage=true", "runtime.zero_stage: True, expected one of 0, 1, 2, 3."),
        ("reward.weights={answer: true}", "reward.weights.answer: True, expected a number."),
        ("seed=2147483648", "seed: 2147483648, expected an integer >= 0 and < 2147483648."),
        ("train.beta1=", "train.beta1: '', expected a number >= 0 and < 1."),
        ("steps=1.5", "steps: 1.5, expected an integer >= 0."),
        ("steps=true", "steps: True, expected an integer >= 0."),
        ("imitation.noise=2", "imitation.noise: 2, expected a number >= 0 and <= 1."),
        ("runtime.zero_stage=4", "runtime.zero_stage: 4, expected one of 0, 1, 2, 3."),
        ("rl.advantage=gpro", "rl.advantage: 'gpro', expected one of grpo, dr_grpo, reinforce_pp."),
        ("runtime.fallback=maybe", "runtime.fallback: 'maybe', expected true or false."),
        ("env.options=3", "env.options: 3, expected `name: value` pairs."),
    ],
)
def test_a_wrong_value_is_explained(tmp_path: Path, override: str, explanation: str) -> None:
    assert mistake(tmp_path, "", override) == f"command line: {explanation}"


def test_text_that_yaml_reads_as_a_number_is_explained(tmp_path: Path) -> None:
    explanation = "FILE, line 1: run_dir: 7, expected text (quote it if it looks like a number)."
    assert mistake(tmp_path, "run_dir: 7\n") == explanation


def test_a_value_in_place_of_a_section_is_explained(tmp_path: Path) -> None:
    assert mistake(tmp_path, "rl: 3\n") == "FILE, line 1: rl: 3, expected a section: `field: value` lines."


def test_all_mistakes_are_listed_at_once_each_with_its_own_place(tmp_path: Path) -> None:
    lines = mistake(tmp_path, "rl:\n  group_size: 0\ntrain:\n  betta1: 0.5\n", "steps=-1").splitlines()
    assert sorted(lines) == [
        "FILE, line 2: rl.group_size: 0, expected an integer >= 2.",
        "FILE, line 4: train.betta1: unknown key. Did you mean train.beta1?",
        "command line: steps: -1, expected an integer >= 0.",
    ]


@pytest.mark.parametrize(
    ("text", "explanation"),
    [
        ("seed: 1\nsteps: 2\nseed: 3\n", "FILE, line 3: seed is given twice, first in line 1; remove one of them."),
        (
            "rl:\n  epochs: 1\n  epochs: 1\n",
            "FILE, line 3: rl.epochs is given twice, first in line 2; remove one of them.",
        ),
        ("rl:\n  epochs: 1\nseed: 1\nrl:\n", "FILE, line 4: rl is given twice, first in line 1; remove one of them."),
        ("1: 2\n", "FILE, line 1: a key must be text, not '1'; quote it."),
        ("rl:\n  <<: {epochs: 1}\n", "FILE, line 2: merge keys (<<) are not supported: write the fields out."),
        ("rl:\n\tepochs: 1\n", "FILE, line 2: a tab; indent with spaces."),
        ("seed: &s 3\nsteps: *s\n", "FILE, line 2: aliases (*name) are not supported: write the value out."),
    ],
)
def test_yaml_beyond_plain_values_is_refused_with_its_line(tmp_path: Path, text: str, explanation: str) -> None:
    assert mistake(tmp_path, text) == explanation


def test_broken_yaml_is_refused_with_its_line(tmp_path: Path) -> None:
    assert mistake(tmp_path, "seed: 1\nrl:\n\tepochs: 1\n").startswith("FILE, line 3: ")
    assert mistake(tmp_path, "seed: 1\n---\nseed: 2\n").startswith("FILE, line 2: ")
    assert mistake(tmp_path, "seed: !!python/object:os.system 1\n").startswith("FILE, line 1: ")


def test_a_list_for_a_config_is_refused(tmp_path: Path) -> None:
    assert mistake(tmp_path, "- 1\n") == "FILE: expected `section:` lines with `field: value` below them, found [1]."


@pytest.mark.parametrize(
    ("override", "explanation"),
    [
        ("rl.epochs", "'rl.epochs' is no override; write section.field=value, rl.group_size=8."),
        ("=3", "'=3' is no override; write section.field=value, rl.group_size=8."),
        ("rl..epochs=3", "'rl..epochs=3' is no override; write section.field=value, rl.group_size=8."),
        ("rl=3", "rl is a section; set its fields, as in rl.group_size=value."),
        ("seed.low=3", "'seed.low=3': seed is 5, which has no fields to set."),
        (
            "env.options.a={b: 1, b: 2}",
            "env.options.a: '{b: 1, b: 2}' is not a YAML value: "
            "line 1: b is given twice, first in line 1; remove one of them.",
        ),
    ],
)
def test_a_malformed_override_is_explained(tmp_path: Path, override: str, explanation: str) -> None:
    assert mistake(tmp_path, "seed: 5\n", override) == f"command line: {explanation}"


def test_a_missing_file_is_reported_with_its_neighbours(tmp_path: Path) -> None:
    (tmp_path / "demo.yaml").write_text("")
    with pytest.raises(ConfigError) as caught:
        load_config(tmp_path / "dmo.yaml")
    assert str(caught.value) == f"{tmp_path}/dmo.yaml: no such config file. There is {tmp_path}/demo.yaml."


def test_a_folder_or_binary_file_is_reported(tmp_path: Path) -> None:
    binary = tmp_path / "x.yaml"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path, binary):
        with pytest.raises(ConfigError, match="cannot read this config file"):
            load_config(path)


@pytest.mark.parametrize(
    ("overrides", "explanation"),
    [
        (["env.workers=4", "env.num_envs=2"], "env.workers: 4, expected at most env.num_envs (2)."),
        (
            ["agent.min_pixels=200", "agent.max_pixels=100"],
            "agent.min_pixels: 200, expected at most agent.max_pixels (100).",
        ),
        (
            ["rollout.max_tokens=64", "runtime.max_model_len=64"],
            "rollout.max_tokens: 64, expected less than runtime.max_model_len (64), which the prompt is part of.",
        ),
        (["run_dir="], "run_dir: empty, expected a folder's name."),
        (["model.path="], "model.path: empty, expected a folder, a hub id or tiny:qwen2_5_vl."),
        (
            ["agent.instruction_template={goal}"],
            "agent.instruction_template: '{goal}', expected only {instruction} and {actions} in braces, not 'goal'.",
        ),
        (
            ["agent.instruction_template={x"],
            "agent.instruction_template: '{x', which does not parse (expected '}' before end of string); "
            "write {{ and }} for braces that are text.",
        ),
    ],
)
def test_fields_that_contradict_one_another_are_explained(
    tmp_path: Path, overrides: list[str], explanation: str
) -> None:
    assert mistake(tmp_path, "", *overrides) == f"command line: {explanation}"


def test_a_config_error_is_a_user_error_and_a_value_error() -> None:
    assert issubclass(ConfigError, UserError)
    assert issubclass(ConfigError, ValueError)


# --- saving


TEXT = st.text(st.characters(exclude_categories=["Cs", "Cc"]))


@settings(max_examples=40)
@example(lr=1.0, seed=0, prompt="010", options={"1:30": "1:30", "x": "0x1f", "y": "1_0", "z": "-.5", "08": "1:30.5"})
@example(lr=1e-6, seed=0, prompt="0E0", options={"1e5": "1e-3", "date": "2026-11-29", "yes": "no", "x": -0.0})
@given(
    lr=st.floats(min_value=1e-12, max_value=1e3),
    seed=st.integers(min_value=0, max_value=2**31 - 1),
    prompt=TEXT,
    options=st.dictionaries(TEXT, st.booleans() | st.floats(allow_nan=False) | st.integers() | TEXT),
)
def test_a_saved_config_loads_back_equal(
    tmp_path_factory: pytest.TempPathFactory, lr: float, seed: int, prompt: str, options: dict[str, object]
) -> None:
    default = RunConfig()
    config = dataclasses.replace(
        default,
        seed=seed,
        train=dataclasses.replace(default.train, lr=lr),
        agent=dataclasses.replace(default.agent, system_prompt=prompt),
        env=dataclasses.replace(default.env, options=options),
    )
    path = tmp_path_factory.mktemp("saved") / "config.yaml"
    save_config(config, path)
    assert load_config(path) == config


def test_a_saved_config_holds_every_field(tmp_path: Path) -> None:
    path = tmp_path / "config.yaml"
    save_config(RunConfig(), path)
    text = path.read_text()
    for section in dataclasses.fields(RunConfig):
        assert f"{section.name}:" in text
    assert "  group_size: 8\n" in text


def test_options_that_are_not_plain_yaml_cannot_be_saved(tmp_path: Path) -> None:
    config = dataclasses.replace(RunConfig(), env=dataclasses.replace(RunConfig().env, options={"x": object()}))
    with pytest.raises(ConfigError, match="cannot write this config"):
        save_config(config, tmp_path / "config.yaml")


def test_the_digest_follows_what_decides_the_numbers_and_nothing_else(tmp_path: Path) -> None:
    path = write(tmp_path, "")
    digest = config_digest(load_config(path))
    assert len(digest) == 16
    assert config_digest(load_config(path, ["run_dir=elsewhere", "resume=auto", "save_every=1"])) == digest
    assert config_digest(load_config(path, ["rl.kl_coef=0.1"])) != digest
    assert config_digest(load_config(path, ["env.options.image_size=64"])) != digest


def test_bfloat16_needs_float32_gradients() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.zero_stage: 0, expected 1, 2 or 3 with model\.dtype=bfloat16"):
        load_config("configs/demo.yaml", ["model.dtype=bfloat16", "runtime.zero_stage=0"])
    load_config("configs/demo.yaml", ["model.dtype=float32", "runtime.zero_stage=0"])


def test_a_loss_that_needs_the_whole_batch_cannot_be_streamed() -> None:
    with pytest.raises(ConfigError, match=r"runtime\.schedule: streamed, but rl\.advantage=reinforce_pp needs"):
        load_config("configs/demo.yaml", ["rl.advantage=reinforce_pp", "runtime.schedule=streamed"])
    load_config("configs/demo.yaml", ["rl.advantage=reinforce_pp", "runtime.schedule=overlapped"])
