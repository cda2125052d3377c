"""The house is as docs/design.md draws it: every module in its room, and data that flows one way."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from graphlib import TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NAME = "nvflare_torchrun_plugin"
PACKAGE = ROOT / NAME
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in PACKAGE.rglob("*.py")
}
AGENTS = ("node_agent", "torchrun_node", "rank", "joining.dial_in", "checks.node_probe")
ON_THE_WAY = ("relay", "joining.bridge")
IN_NODE = tuple(f"node.{path.stem}" for path in sorted((PACKAGE / "node").glob("[!_]*.py")))


def imported(module: str, *, at_once: bool = False) -> Iterator[str]:
    """Yield the full names of the modules that one imports: anywhere in its code, or as soon as it is loaded."""
    path = MODULES[module]
    package = (module if path.name == "__init__.py" else module.rpartition(".")[0]).split(".")
    tree = ast.parse(path.read_text())
    for node in tree.body if at_once else ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            parts = package[: len(package) + 1 - node.level] if node.level else []
            base = ".".join([*parts, *([node.module] if node.module else [])])
            for alias in node.names:
                yield f"{base}.{alias.name}" if f"{base}.{alias.name}" in MODULES else base


def room(module: str) -> str:
    """Return the folder of a module of ours, empty for what stands at the top."""
    parts = module.split(".")[1:]
    return parts[0] if parts and (PACKAGE / parts[0]).is_dir() else ""


def test_every_module_is_in_the_room_that_the_design_gives_it() -> None:
    _, _, table = (ROOT / "docs" / "design.md").read_text().partition("| room | what is in it | modules |")
    drawn: dict[str, set[str]] = {}
    for line in table.partition("\n\n")[0].splitlines():
        if (cells := re.fullmatch(r"\| (?:\(top\)|`(\w+)/`) \|.*\|([^|]*)\|", line)) is not None:
            drawn.setdefault(cells[1] or "", set()).update(re.findall(r"`(\w+)`", cells[2]))
    built: dict[str, set[str]] = {}
    for path in PACKAGE.rglob("*.py"):
        folder = path.parent.relative_to(PACKAGE).as_posix().removeprefix(".")
        built.setdefault(folder, set()).update({path.stem} - {"__init__"})
    # Of these the design says what they are for, not what each file does.
    for plain in ("schedulers", "client", "cli"):
        built[plain] = set()
    assert drawn == built


def test_no_two_rooms_need_each_other() -> None:
    needs: dict[str, set[str]] = {}
    for module in MODULES:
        ours = {room(name) for name in imported(module) if name.partition(".")[0] == NAME}
        needs.setdefault(room(module), set()).update(ours - {room(module), ""})
    del needs[""]  # what stands at the top is above the rooms, or below them
    order = list(TopologicalSorter(needs).static_order())  # its CycleError names those that do
    assert order.index("node") < order.index("description") < order.index("launching") < order.index("supervision")
    assert [name for name, others in needs.items() if "cli" in others] == []


@pytest.mark.parametrize("name", [*AGENTS, *ON_THE_WAY, *IN_NODE])
def test_what_runs_on_a_node_starts_with_the_standard_library_only(name: str) -> None:
    seen: set[str] = set()
    waiting = {f"{NAME}.{name}"}
    while waiting:
        module = waiting.pop()
        seen.add(module)
        for other in imported(module, at_once=True):
            if other.partition(".")[0] != NAME:
                assert other.partition(".")[0] in sys.stdlib_module_names, module
            elif other not in seen:
                waiting.add(other)
