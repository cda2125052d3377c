"""The site's own say, ``local/node_group.yaml`` in its workspace.

It describes the site's nodes, and lists the scripts that any job may run. An example::

    nodes: [{host: localhost, nproc_per_node: 4}]
    env: {NCCL_DEBUG: WARN}
    allowed_scripts: [/opt/site/train.py]
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import yaml
from yaml.nodes import MappingNode, Node, ScalarNode

from nvflare_torchrun_plugin.description.group_description import GROUP_HINTS, GROUP_KEYS, NodeGroup, parse
from nvflare_torchrun_plugin.group_values import NodeGroupError, check_keys, shown, text_of

NAME = "node_group.yaml"
"""Name of the file, beside NVFlare's own site files."""

_SCRIPTS = "allowed_scripts"


@dataclass(frozen=True)
class SiteFile:
    """What the file says."""

    group: NodeGroup | None
    """The site's nodes; None: it leaves them to the job."""

    allowed_scripts: tuple[str, ...]
    """Absolute paths of the scripts that a job without the bring-your-own-code right may run."""

    path: str
    """Where the file is, for messages."""


def read_site_file(path: str, environ: Mapping[str, str] | None) -> SiteFile | None:
    """Read the file; None when there is none.

    An empty file says nothing, as one in which all is commented out.

    Args:
        path: the file.
        environ: the environment of the client job, in which ``nodes: auto`` finds its scheduler; None when this
            is not the site's host (see :func:`group_description.parse`).

    Raises:
        NodeGroupError: it cannot be read, is no YAML, gives a key twice, or a value is wrong. The message
            names the file, and the line where YAML tells it.
    """
    source = f"site file {path}"
    try:
        content = Path(path).read_bytes()
    except FileNotFoundError:
        return None
    except OSError as error:
        raise NodeGroupError(f"{source} cannot be read: {error.strerror}; correct or remove it") from None
    given = _load(content, source)
    keys = check_keys({} if given is None else given, (*GROUP_KEYS, _SCRIPTS), source, GROUP_HINTS)
    described = {key: value for key, value in keys.items() if key != _SCRIPTS}
    return SiteFile(
        group=parse(described, source, environ) if described else None,
        allowed_scripts=_scripts(keys.get(_SCRIPTS), source),
        path=path,
    )


def _load(content: bytes, source: str) -> object:
    try:
        return yaml.load(content, Loader=_StrictLoader)  # noqa: S506 - a subclass of SafeLoader
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f" line {mark.line + 1}" if mark else ""
        raise NodeGroupError(f"{source}{line} is no valid YAML: {error.problem}; correct it") from None
    except RecursionError:
        raise NodeGroupError(f"{source} is no valid YAML: nested too deeply; correct it") from None
    except (yaml.YAMLError, ValueError) as error:
        # PyYAML lets the ValueError of a bad escape ("\U00110000") through.
        raise NodeGroupError(f"{source} is no valid YAML: {error}; correct it") from None


class _StrictLoader(yaml.SafeLoader):
    """SafeLoader that refuses a key given twice (PyYAML takes the last) and names the line of a bad value."""

    # When nodes are composed, merge keys ("<<") have not been copied into the mappings yet.
    def compose_mapping_node(self, anchor: dict[object, Node]) -> MappingNode:
        mapping = super().compose_mapping_node(anchor)
        seen = set()
        for key, _ in mapping.value:
            if isinstance(key, ScalarNode):
                if key.value in seen:
                    raise yaml.MarkedYAMLError(
                        problem=f"key {shown(key.value)} is given twice", problem_mark=key.start_mark
                    )
                seen.add(key.value)
        return mapping

    def construct_object(self, node: Node, deep: bool = False) -> object:
        try:
            return super().construct_object(node, deep)
        except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError):
            # PyYAML's own constructors fail with any of these on a date 2000-99-99 or a "!!int x".
            raise yaml.MarkedYAMLError(
                problem="a value is not of the type that its form or its tag says",
                problem_mark=node.start_mark,
            ) from None


def _scripts(value: object, source: str) -> tuple[str, ...]:
    if value is None:
        return ()
    if not isinstance(value, list):
        raise NodeGroupError(
            f"{source}: {_SCRIPTS} is {shown(value)}: must be a list of the absolute paths of scripts"
        )
    scripts = []
    for index, entry in enumerate(value):
        where = f"{source}: {_SCRIPTS}[{index}]"
        script = text_of(entry, where, "the absolute path of a script")
        if script is None or not Path(script).is_absolute():
            raise NodeGroupError(f"{where} is {shown(script)}: must be the absolute path of a script")
        scripts.append(script)
    return tuple(scripts)
