"""From a YAML file and command-line overrides to a checked `RunConfig`, and back to YAML.

Knows the schema alone: nothing about models, devices or what a knob does. Every mistake that can be seen without a
model is found here, all of them at once, each with its place, its value and what was expected.
"""

from __future__ import annotations

import dataclasses
import difflib
import hashlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from string import Formatter
from typing import Any, Literal, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.fields import FieldInfo

from configs.errors import ConfigError
from configs.plain_yaml import YAMLMistake, dump_yaml, parse_yaml
from configs.schema import NEEDS_BATCH, REWARD_PARTS, RunConfig

COMMAND_LINE = "command line"
BOOKKEEPING = ("run_dir", "resume", "save_every", "keep_checkpoints")
"""Top-level fields that change where and how often things are stored, and no number."""


def load_config(path: str | os.PathLike[str], overrides: Sequence[str] = ()) -> RunConfig:
    """Read a YAML file, apply `section.field=value` overrides in order, and check the result.

    Raises:
        ConfigError: the file, an override or a value is wrong; lists every mistake, one a line.
    """
    tree, origins = _read_file(Path(path))
    for override in overrides:
        field_path = _apply_override(tree, override)
        origins[field_path] = COMMAND_LINE
    return _validate(tree, origins)


def save_config(config: RunConfig, path: str | os.PathLike[str]) -> None:
    """Write every field as YAML that `load_config` reads back to an equal config.

    Raises:
        ConfigError: `env.options` holds something that is not plain YAML.
    """
    try:
        text = dump_yaml(dataclasses.asdict(config))
    except YAMLMistake as error:
        raise ConfigError(f"{path}: cannot write this config: {error}") from None
    Path(path).write_text(text, encoding="utf-8")


def config_digest(config: RunConfig) -> str:
    """16 hex digits that are equal for configs that give the same numbers (`BOOKKEEPING` is left out)."""
    fields = {name: value for name, value in dataclasses.asdict(config).items() if name not in BOOKKEEPING}
    return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:16]


# --- reading -----------------------------------------------------------------------------------------------------


def _read_file(path: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """The file's values, and for each dotted path the place that a message names."""
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise ConfigError(f"{path}: no such config file.{_other_files(path)}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot read this config file: {error}") from None
    try:
        tree, lines = parse_yaml(text)
    except YAMLMistake as error:
        raise ConfigError(f"{path}, {error}") from None
    if tree is None:
        tree = {}
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: expected `section:` lines with `field: value` below them, found {tree!r}.")
    for name in [name for name, value in tree.items() if value is None and name in _sections()]:
        del tree[name]  # a heading whose fields are all commented out
    return tree, {"": str(path)} | {field_path: f"{path}, line {line}" for field_path, line in lines.items()}


def _other_files(path: Path) -> str:
    names = sorted(str(other) for other in path.parent.glob("*.yaml")) if path.parent.is_dir() else []
    return f" There is {', '.join(names)}." if names else ""


def _apply_override(tree: dict[str, Any], override: str) -> str:
    """Put the override's value into `tree` and return its dotted path."""
    field_path, equals, text = override.partition("=")
    keys = field_path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"{COMMAND_LINE}: {override!r} is no override; write section.field=value, rl.group_size=8.")
    if field_path in _sections():
        example = next(path for path in _field_paths() if path.startswith(f"{field_path}."))
        raise ConfigError(f"{COMMAND_LINE}: {field_path} is a section; set its fields, as in {example}=value.")
    branch = tree
    for depth, key in enumerate(keys[:-1], start=1):
        branch = branch.setdefault(key, _default_entries(".".join(keys[:depth])))
        if not isinstance(branch, dict):
            parent = ".".join(keys[:depth])
            raise ConfigError(f"{COMMAND_LINE}: {override!r}: {parent} is {branch!r}, which has no fields to set.")
    branch[keys[-1]] = _parse_override_value(field_path, text)
    return field_path


def _default_entries(field_path: str) -> dict[str, Any]:
    """What a field of `name: value` pairs holds where the file does not set it; nothing for a section."""
    field = _field_paths().get(field_path)
    default = field.get_default(call_default_factory=True) if field else {}
    return default if isinstance(default, dict) else {}


def _parse_override_value(field_path: str, text: str) -> Any:
    """YAML for everything but text fields, which are taken as they are unless they are quoted."""
    field = _find_field(field_path)
    if text == "" or (field is not None and field.annotation is str and not text.startswith(('"', "'"))):
        return text
    try:
        return parse_yaml(text)[0]
    except YAMLMistake as error:
        raise ConfigError(f"{COMMAND_LINE}: {field_path}: {text!r} is not a YAML value: {error}") from None


# --- checking ----------------------------------------------------------------------------------------------------


def _validate(tree: dict[str, Any], origins: Mapping[str, str]) -> RunConfig:
    try:
        config = _SCHEMA.validate_python(tree)
    except ValidationError as error:
        mistakes = [_describe_mistake([str(key) for key in item["loc"]], item) for item in error.errors()]
    else:
        mistakes = [*_swallowed_booleans(tree), *_cross_checks(config)]
        if not mistakes:
            return config
    raise ConfigError("\n".join(f"{_origin(origins, path)}: {path}: {text}" for path, text in mistakes))


def _describe_mistake(keys: list[str], item: Mapping[str, Any]) -> tuple[str, str]:
    """Dotted path and explanation of one of pydantic's errors."""
    field_path = ".".join(keys)
    if item["type"] in ("unexpected_keyword_argument", "invalid_key"):
        return field_path, f"unknown key.{_suggest(keys, item['input'])}"
    value = "no value" if item["input"] is None else repr(item["input"])
    field = _find_field(field_path)
    if field is None:  # inside a nested value: pydantic's own words are the best there are
        return field_path, f"{value}: {item['msg']}."
    expected = _expected(field)
    if item["type"] == "finite_number":
        expected = expected.replace("a number", "a finite number")
    return field_path, f"{value}, expected {expected}."


def _swallowed_booleans(tree: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Numbers given as true or false, which pydantic reads as 1 and 0."""
    for field_path, field in _field_paths().items():
        value: Any = tree
        for key in field_path.split("."):
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) and field.annotation is not bool:
            yield field_path, f"{value!r}, expected {_expected(field)}."
        if isinstance(value, dict) and field.annotation == dict[str, float]:
            for name, number in value.items():
                if isinstance(number, bool):
                    yield f"{field_path}.{name}", f"{number!r}, expected a number."


def _cross_checks(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Rules between fields, and of texts, that no single field's range can state."""
    agent, env, rollout, runtime = config.agent, config.env, config.rollout, config.runtime
    if not config.run_dir.strip():
        yield "run_dir", "empty, expected a folder's name."
    if not config.model.path.strip():
        yield "model.path", "empty, expected a folder, a hub id or tiny:qwen2_5_vl."
    if agent.min_pixels > agent.max_pixels:
        yield "agent.min_pixels", f"{agent.min_pixels}, expected at most agent.max_pixels ({agent.max_pixels})."
    if env.workers > env.num_envs:
        yield "env.workers", f"{env.workers}, expected at most env.num_envs ({env.num_envs})."
    if rollout.max_tokens >= runtime.max_model_len:
        limit = f"less than runtime.max_model_len ({runtime.max_model_len}), which the prompt is part of"
        yield "rollout.max_tokens", f"{rollout.max_tokens}, expected {limit}."
    if runtime.reuse_prefill and runtime.window_sms:
        yield (
            "runtime.reuse_prefill",
            "true, expected false with runtime.window_sms > 0: what is reused changes streams.",
        )
    if runtime.zero_stage == 0 and config.model.dtype == "bfloat16":
        yield "runtime.zero_stage", "0, expected 1, 2 or 3 with model.dtype=bfloat16: 0 has no float32 gradients."
    if runtime.schedule == "streamed" and config.rl.advantage in NEEDS_BATCH:
        why = f"rl.advantage={config.rl.advantage} needs the whole batch before any group can be trained on"
        yield "runtime.schedule", f"streamed, but {why}: expected overlapped."
    if mistake := _template_mistake(agent.instruction_template):
        yield "agent.instruction_template", f"{agent.instruction_template!r}, {mistake}."
    yield from _reward_mistakes(config)


def _reward_mistakes(config: RunConfig) -> Iterator[tuple[str, str]]:
    """Names of reward parts, and texts in `reward` that must parse."""
    reward = config.reward
    known = [*REWARD_PARTS, *reward.functions]
    for name in reward.weights:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1) or known
            yield "reward.weights", f"unknown part {name!r}. Did you mean {' or '.join(near)}?"
    if not any(reward.weights.values()):
        yield "reward.weights", f"{reward.weights!r}, expected a part with a weight other than 0, as in {{answer: 1}}."
    for name, place in reward.functions.items():
        if not re.fullmatch(r"[\w.]+:\w+", place) or name in REWARD_PARTS:
            yield "reward.functions", f"{name}: {place!r}, expected a new name and module:function."
        elif name not in reward.weights:
            yield "reward.functions", f"{name} has no weight; add it to reward.weights."
    try:
        re.compile(reward.format_pattern)
    except re.error as error:
        yield "reward.format_pattern", f"{reward.format_pattern!r}, which does not parse ({error})."
    limit = reward.length_limit_tokens or config.rollout.max_tokens
    if "length" in reward.weights and reward.length_free_tokens >= limit:
        yield "reward.length_free_tokens", f"{reward.length_free_tokens}, expected less than the limit ({limit})."


def _template_mistake(template: str) -> str:
    try:
        names = {name for _, name, _, _ in Formatter().parse(template) if name is not None}
    except ValueError as error:
        return f"which does not parse ({error}); write {{{{ and }}}} for braces that are text"
    unknown = sorted(names - {"instruction", "actions"})
    return f"expected only {{instruction}} and {{actions}} in braces, not {unknown[0]!r}" if unknown else ""


# --- what the schema says ----------------------------------------------------------------------------------------

_SCHEMA: TypeAdapter[RunConfig] = TypeAdapter(RunConfig)


def _fields(cls: Any) -> dict[str, FieldInfo]:
    fields: dict[str, FieldInfo] = cls.__pydantic_fields__
    return fields


def _sections() -> dict[str, FieldInfo]:
    return {name: field for name, field in _fields(RunConfig).items() if dataclasses.is_dataclass(field.annotation)}


def _field_paths() -> dict[str, FieldInfo]:
    """Every field that holds a value, by dotted path."""
    paths = {name: field for name, field in _fields(RunConfig).items() if name not in _sections()}
    for name, section in _sections().items():
        paths |= {f"{name}.{leaf}": field for leaf, field in _fields(section.annotation).items()}
    return paths


def _find_field(field_path: str) -> FieldInfo | None:
    return _field_paths().get(field_path) or _sections().get(field_path)


def _suggest(keys: Sequence[str], value: Any) -> str:
    """The same name in another section, else the most alike in this section, else the most alike anywhere."""
    field_path = ".".join(keys)
    if field_path in _field_paths():  # written with its dot, in a file
        section, _, leaf = field_path.rpartition(".")
        return f" Write it as two lines, `{section}:` and, indented below it, `{leaf}: ...`."
    known = [*_field_paths(), *_sections()]
    section, _, leaf = field_path.rpartition(".")
    siblings = [path for path in known if path.rpartition(".")[0] == section]
    near = [path for path in known if path.rpartition(".")[2] == leaf] or _alike(leaf, siblings) or _alike(leaf, known)
    if not near and isinstance(value, dict):  # no section of ours: by the fields in it
        near = [path for path in known if path.rpartition(".")[2] in value]
    if near:
        return f" Did you mean {' or '.join(near)}?"
    return f" Known here: {', '.join(path.rpartition('.')[2] for path in siblings)}."


def _alike(leaf: str, paths: Sequence[str]) -> list[str]:
    """The paths with the last name that is most alike, upper and lower case aside."""
    names = difflib.get_close_matches(leaf.casefold(), [path.rpartition(".")[2] for path in paths], n=1)
    return [path for path in paths if path.rpartition(".")[2] in names]


_EXPECTED: dict[Any, str] = {
    int: "an integer",
    float: "a number",
    bool: "true or false",
    str: "text (quote it if it looks like a number)",
}


def _expected(field: FieldInfo) -> str:
    """What a field takes, in words: type and bounds."""
    kind = field.annotation
    if dataclasses.is_dataclass(kind):
        return "a section: `field: value` lines"
    if get_origin(kind) is Literal:
        return "one of " + ", ".join(str(choice) for choice in get_args(kind))
    if get_origin(kind) is dict:
        return "`name: value` pairs"
    return " ".join([_EXPECTED[kind], " and ".join(_bounds(field))]).strip()


def _bounds(field: FieldInfo) -> Iterator[str]:
    signs: dict[str, str] = {"ge": ">=", "gt": ">", "le": "<=", "lt": "<"}
    for constraint in field.metadata:
        for name, sign in signs.items():
            if (bound := getattr(constraint, name, None)) is not None:
                yield f"{sign} {bound}"


def _origin(origins: Mapping[str, str], field_path: str) -> str:
    """Where a path was set, the file's line or the command line: itself, else something in it, else what holds it."""
    for path in [field_path, *(path for path in origins if path.startswith(f"{field_path}."))]:
        if path in origins:
            return origins[path]
    return _origin(origins, field_path.rpartition(".")[0])
