"""A rank's imports ahead of its task, and how a script does not notice them (standard library only).

What was imported is taken out of ``sys.modules`` again, and what importing has changed is put back
(``process_state.py``). Both come back when the script imports the module itself, or one that was imported after
it. So a script finds what it would have found, but need not wait for it.
"""

from __future__ import annotations

# ruff: noqa: PTH120 - pathlib would be one more module that the script finds loaded
import _thread
import os
import sys
from _frozen_importlib_external import PathFinder

from nvflare_torchrun_plugin.ranks.process_state import State
from nvflare_torchrun_plugin.ranks.run_program import foresee_main, is_importable, is_path_safe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from nvflare_torchrun_plugin.ranks.agent_link import Agent, Orders

_LONGEST = 300
"""Characters of a sentence on a module that could not be imported."""


def preload(orders: Orders, path0: list[str], agent: Agent) -> None:
    """Import what the orders name, wait for the agent's word, and put everything as the script must find it.

    Args:
        orders: what the rank is to run.
        path0: what ``python -m`` puts in front of ``sys.path``.
        agent: gives the word.

    Raises:
        AgentError: the agent has gone.
    """
    before = State()
    # Where the script's own files hide a library's, they do so for other libraries too.
    sys.path[:0] = path0 if orders.module else _path_of_script(orders.target)
    foresee_main(orders)
    path = list(sys.path)
    groups: list[_Group] = []
    failed: list[str] = []
    for entry in orders.preload or ():
        state, names = State(), set(sys.modules)
        name, _, attribute = entry.partition(":")
        try:
            __import__(name, fromlist=(attribute,) if attribute else ())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the script will meet it, and say what comes of it
            failed.append(f"{entry}: {type(error).__name__}: {error}"[:_LONGEST])
        groups.append(_Group({name: sys.modules[name] for name in sys.modules if name not in names}, state))
    if groups:
        # A library's thread may import something while the rank waits.
        finder = _Finder(groups, path)
        sys.meta_path.insert(0, finder)
        finder.hide(before)
    environ = agent.wait_for_go(failed)
    os.environ.update(environ)


def _path_of_script(target: str) -> list[str]:
    if is_importable(target):
        return [target]
    return [] if is_path_safe() else [os.path.dirname(os.path.realpath(target))]


class _Group:
    """What one import has loaded and changed."""

    def __init__(self, modules: dict[str, ModuleType], before: State) -> None:
        self.modules = modules
        self.parents = {name: sys.modules.get(name.rpartition(".")[0]) for name in modules}
        self._before = before
        self._after = State()
        self._attributes: list[tuple[ModuleType, str, ModuleType]] = []

    def hide(self) -> None:
        """Take the modules away."""
        self._after.log.undo(self._before.log)
        self._after.kept.undo(self._before.kept)
        for name, module in self.modules.items():
            parent_name, _, child = name.rpartition(".")
            parent = sys.modules.get(parent_name)
            if parent_name not in self.modules and getattr(parent, "__dict__", {}).get(child) is module:
                delattr(parent, child)
                self._attributes.append((sys.modules[parent_name], child, module))
        for name in self.modules:
            sys.modules.pop(name, None)

    def show(self) -> None:
        """Bring everything back."""
        for name, module in self.modules.items():
            sys.modules.setdefault(name, module)
        for parent, child, module in self._attributes:
            setattr(parent, child, module)
        self._after.follow(self._before)


class _Finder:
    """Finds what is hidden, first of all finders, until everything is back.

    Args:
        groups: what has been imported.
        path: the path on which that was found.
    """

    def __init__(self, groups: list[_Group], path: list[str]) -> None:
        self._groups = groups
        self._path = path
        self._lock = _thread.RLock()

    def hide(self, before: State) -> None:
        """Take everything away, and put everything as it was."""
        with self._lock:
            for group in reversed(self._groups):
                group.hide()
            before.restore()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return what brings the module back; to look for it is not to import it, and changes nothing."""
        for group in self._groups:
            module = group.modules.get(name)
            if module is not None and self._is_found_there(name, group):
                return self._spec(name, module)
        return None

    def _is_found_there(self, name: str, group: _Group) -> bool:
        """Return whether the script, which may have changed its path since, would find the same module."""
        parent, _, _ = name.rpartition(".")
        if parent:
            return sys.modules.get(parent) is group.parents[name]
        if sys.path == self._path:
            return True
        before, now = (PathFinder.find_spec(name, path) for path in (self._path, sys.path))
        return (before and before.origin) == (now and now.origin)

    def show(self, name: str) -> None:
        """Bring back the module, with all that was imported before and together with it."""
        # Another thread may be looking meanwhile: until it is all there, this is where it is found.
        with self._lock:
            while any(name in group.modules for group in self._groups):
                first = self._groups[0]
                first.show()
                self._groups = [group for group in self._groups if group is not first]
            if not self._groups and self in sys.meta_path:
                sys.meta_path.remove(self)

    def _spec(self, name: str, module: ModuleType) -> ModuleSpec:
        kind = type(os.__spec__)
        spec: ModuleSpec = kind.__new__(kind)
        own = getattr(module, "__spec__", None)
        vars(spec).update(vars(own) if own is not None else vars(kind(name, None)))
        spec.loader = _Loader(self, module, own)  # type: ignore[assignment]  # as above
        return spec


class _Loader:
    """Loads a module that is there; in all else it is the module's own loader."""

    def __init__(self, finder: _Finder, module: ModuleType, spec: ModuleSpec | None) -> None:
        self._finder = finder
        self._module = module
        self._spec = spec

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        self._finder.show(spec.name)
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Give the module its own spec back; its code has been run."""
        if self._spec is not None:
            module.__spec__ = self._spec

    def __getattr__(self, name: str) -> Any:
        return getattr(self._spec.loader if self._spec is not None else None, name)
