"""YAML that holds plain values only: every key once, no anchors, and `1e-6` is a number.

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


_PlainLoader.yaml_implicit_resolvers = {  # dates stay text
    first: [(tag, regexp) for tag, regexp in resolvers if tag != "tag:yaml.org,2002:timestamp"]
    for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


class _PlainDumper(yaml.SafeDumper):
    """PyYAML's safe dumper, which writes a value out each time where it would write an alias."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


# YAML 1.1, which PyYAML speaks, wants a point and a sign in the exponent: 1e-6 would be text. The reader takes it for a
# number, and so the writer must know to quote text that looks like that.
for _side in (_PlainLoader, _PlainDumper):
    _side.add_implicit_resolver(
        "tag:yaml.org,2002:float", re.compile(r"^[-+]?(\d+\.?\d*|\.\d+)[eE][-+]?\d+$"), list("-+.0123456789")
    )


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
