"""YAML that holds plain values only: every key once, no anchors, and numbers as YAML 1.2 reads them.

Knows nothing about what the values mean.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import yaml


class YAMLMistake(ValueError):
    """The text is not the YAML that we take; the message begins with the line where one is known."""


class _PlainLoader(yaml.SafeLoader):
    """PyYAML's safe loader without aliases (and so without merge keys)."""

    def compose_node(self, parent: yaml.Node | None, index: int) -> yaml.Node | None:
        if self.check_event(yaml.AliasEvent):
            line = self.peek_event().start_mark.line + 1
            raise YAMLMistake(f"line {line}: aliases (*name) are not supported: write the value out.")
        node: yaml.Node | None = super().compose_node(parent, index)
        return node


class _PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which writes a value out each time where it would write an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _construct_int(loader: yaml.SafeLoader, node: yaml.ScalarNode) -> int:
    text = node.value.replace("_", "")
    return int(text, 0 if text.lstrip("+-")[:2] in ("0x", "0b") else 10)


# YAML 1.1, which PyYAML speaks, reads 010 as 8 and 1:30 as 90, and 1e-6 as text; its dates are values that we do not
# take. The writer keeps 1.1's rules beside ours, so that it quotes what looks like a number in either.
_INT = re.compile(r"^[-+]?(\d[\d_]*|0x[\da-fA-F_]+|0b[01_]+)$")
_FLOAT = re.compile(
    r"^([-+]?(\d[\d_]*\.[\d_]*([eE][-+]?\d+)?|\.\d[\d_]*([eE][-+]?\d+)?|\d[\d_]*[eE][-+]?\d+|\.(inf|Inf|INF))"
    r"|\.(nan|NaN|NAN))$"
)
_REPLACED = {f"tag:yaml.org,2002:{name}" for name in ("timestamp", "int", "float")}
_PlainLoader.yaml_implicit_resolvers = {
    first: [(tag, regexp) for tag, regexp in resolvers if tag not in _REPLACED]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
for _side in (_PlainLoader, _PlainDumper):
    _side.add_implicit_resolver("tag:yaml.org,2002:int", _INT, list("-+0123456789"))
    _side.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+.0123456789"))
_PlainLoader.add_constructor("tag:yaml.org,2002:int", _construct_int)


def parse_yaml(text: str) -> tuple[Any, dict[str, int]]:
    """One document's value, and the line (from 1) of every key by its dotted path.

    Raises:
        YAMLMistake: a syntax error, a key given twice, a key that is not text, or an alias.
    """
    loader = _PlainLoader(text)
    try:
        node = loader.get_single_node()
        if node is None:
            return None, {}
        lines = dict(_key_lines(node, ""))
        return loader.construct_document(node), lines
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1}: " if error.problem_mark else ""
        explanation = ", ".join(part for part in (error.context, error.problem) if part)
        if "'\\t'" in explanation:
            explanation = "a tab; indent with spaces"
        raise YAMLMistake(f"{line}{explanation}.") from None
    except (yaml.YAMLError, ValueError) as error:
        raise error if isinstance(error, YAMLMistake) else YAMLMistake(str(error)) from None
    finally:
        loader.dispose()


def _key_lines(node: yaml.Node, prefix: str) -> Iterator[tuple[str, int]]:
    """Dotted path and line of every key below `node`, refusing what is not text or comes twice."""
    if isinstance(node, yaml.SequenceNode):
        for item in node.value:
            list(_key_lines(item, prefix))  # paths stop at lists; keys inside are checked all the same
    if not isinstance(node, yaml.MappingNode):
        return
    first_line: dict[str, int] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.tag == "tag:yaml.org,2002:merge":
            raise YAMLMistake(f"line {line}: merge keys (<<) are not supported: write the fields out.")
        if key.tag != "tag:yaml.org,2002:str":
            shown = repr(key.value) if isinstance(key, yaml.ScalarNode) else "a list or mapping"
            raise YAMLMistake(f"line {line}: a key must be text, not {shown}; quote it.")
        path = f"{prefix}{key.value}"
        if key.value in first_line:
            raise YAMLMistake(
                f"line {line}: {path} is given twice, first in line {first_line[key.value]}; remove one of them."
            )
        first_line[key.value] = line
        yield path, line
        yield from _key_lines(value, f"{path}.")


def dump_yaml(value: Any) -> str:
    """YAML of plain values (dict, list, text, numbers, booleans, None), keys in their order.

    Raises:
        YAMLMistake: a value is of another type.
    """
    try:
        text: str = yaml.dump(value, Dumper=_PlainDumper, sort_keys=False, allow_unicode=True, width=120)
    except yaml.YAMLError as error:
        raise YAMLMistake(" ".join(str(part) for part in error.args)) from None
    return text
