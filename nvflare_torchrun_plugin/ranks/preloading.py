"""A rank's imports ahead of its task, and how a script does not notice them (standard library only).

What was imported is taken out of ``sys.modules`` again, and what importing has changed is put back: variables,
signal handlers, warning filters, ``sys.path``, hooks and streams of ``sys``, the set-up of logging, the working
directory, settings of the process (umask, locale, limits of Python's, garbage collection) and those that modules
keep (random states, how multiprocessing starts processes). Both come back when the script imports the module
itself, or one that was imported after it. So a script finds what it would have found, but need not wait for it.
"""

from __future__ import annotations

# ruff: noqa: PTH109, PTH120 - pathlib would be one more module that the script finds loaded
import _locale
import _signal  # type: ignore[import-not-found]  # of the interpreter itself; signal wraps it
import _socket
import _thread
import _warnings
import gc
import os
import sys

from nvflare_torchrun_plugin.ranks.run_program import is_importable, is_path_safe

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

    from nvflare_torchrun_plugin.ranks.agent_link import Agent, Orders

_NSIG = 65
_WARNING = 30
"""The root logger's level to begin with."""
_LONGEST = 300
"""Characters of a sentence on a module that could not be imported."""
_HOOKS = (
    *("excepthook", "unraisablehook", "displayhook", "breakpointhook"),
    *("stdin", "stdout", "stderr", "dont_write_bytecode"),
)
_FILTERS: list[Any] = _warnings.filters
"""That of the module warnings, whether that is loaded or not."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_umask, os.umask),
    (sys.getrecursionlimit, sys.setrecursionlimit),
    (sys.getswitchinterval, sys.setswitchinterval),
    (gc.isenabled, lambda on: gc.enable() if on else gc.disable()),
    (gc.get_threshold, lambda thresholds: gc.set_threshold(*thresholds)),
    (gc.get_debug, gc.set_debug),
    (lambda: _locale.setlocale(_locale.LC_ALL, None), lambda name: _locale.setlocale(_locale.LC_ALL, name)),
    # Without this one the wait for the agent's word would end, too.
    (_socket.getdefaulttimeout, _socket.setdefaulttimeout),
)
"""How to learn a setting of the process, and how to make it."""
_KEPT: dict[str, tuple[Callable[[Any], Any], Callable[[Any, Any], object]]] = {
    "multiprocessing": (
        lambda module: module.get_start_method(allow_none=True),
        lambda module, method: module.set_start_method(method, force=True),
    ),
    "logging": (lambda module: module.root.manager.disable, lambda module, level: module.disable(level)),
    "random": (lambda module: module.getstate(), lambda module, state: module.setstate(state)),
    "numpy.random": (
        lambda module: [getattr(part, "tolist", lambda part=part: part)() for part in module.get_state()],
        lambda module, state: module.set_state(tuple(state)),
    ),
    "torch": (
        lambda module: module.get_rng_state().tolist(),
        lambda module, state: module.set_rng_state(module.tensor(state, dtype=module.uint8)),
    ),
}
"""The same, of what modules keep to themselves that are at work for others."""


def preload(orders: Orders, path0: list[str], agent: Agent) -> None:
    """Import what the orders name, wait for the agent's word, and put everything as the script must find it.

    Args:
        orders: what the rank is to run.
        path0: what ``python -m`` puts in front of ``sys.path``.
        agent: gives the word.

    Raises:
        AgentError: the agent has gone.
    """
    before = _State()
    # Where the script's own files hide a library's, they do so for other libraries too.
    sys.path[:0] = path0 if orders.module else _path_of_script(orders.target)
    groups: list[_Group] = []
    failed: list[str] = []
    for entry in orders.preload or ():
        state, names = _State(), set(sys.modules)
        name, _, attribute = entry.partition(":")
        try:
            __import__(name, fromlist=(attribute,) if attribute else ())
        except (Exception, SystemExit) as error:  # noqa: BLE001 - the script will meet it, and say what comes of it
            failed.append(f"{entry}: {type(error).__name__}: {error}"[:_LONGEST])
        groups.append(_Group({name: sys.modules[name] for name in sys.modules if name not in names}, state))
    for group in reversed(groups):
        group.hide()
    before.restore()
    environ = agent.wait_for_go(failed)
    os.environ.update(environ)
    if groups:
        sys.meta_path.insert(0, _Finder(groups))


def _path_of_script(target: str) -> list[str]:
    if is_importable(target):
        return [target]
    return [] if is_path_safe() else [os.path.dirname(os.path.realpath(target))]


class _State:
    """What importing may change and a script can see, at one moment."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.handlers = {number: _handler(number) for number in range(1, _NSIG)}
        self.filters = list(_FILTERS)
        self.path = list(sys.path)
        self.hooks = {name: getattr(sys, name) for name in _HOOKS}
        self.log = _Log()
        self.kept = _Kept()
        self.settings = [learn() for learn, _ in _SETTINGS]
        self.cwd = _cwd()

    def restore(self) -> None:
        """Put everything as it was then."""
        for name in set(os.environ) - set(self.environ):
            del os.environ[name]
        for name, value in self.environ.items():
            if os.environ.get(name) != value:
                os.environ[name] = value
        for number, handler in self.handlers.items():
            if handler is not None and _handler(number) is not handler:
                _signal.signal(number, handler)
        _FILTERS[:] = self.filters
        sys.path[:] = self.path
        for name, hook in self.hooks.items():
            setattr(sys, name, hook)
        for (learn, make), value in zip(_SETTINGS, self.settings, strict=True):
            if learn() != value:
                make(value)
        if self.cwd is not None and _cwd() != self.cwd:
            os.chdir(self.cwd)

    def follow(self, before: _State) -> None:
        """Do what has led from an earlier state to this one, except where the script has done otherwise since."""
        for name in set(before.environ) | set(self.environ):
            was, became = before.environ.get(name), self.environ.get(name)
            if was == became or os.environ.get(name) != was:
                continue
            if became is None:
                del os.environ[name]
            else:
                os.environ[name] = became
        for number, handler in self.handlers.items():
            was = before.handlers[number]
            if handler is not None and handler is not was and _handler(number) is was:
                _signal.signal(number, handler)
        self.log.follow(before.log)
        self.kept.follow(before.kept)
        for (learn, make), was, became in zip(_SETTINGS, before.settings, self.settings, strict=True):
            if became != was and learn() == was:
                make(became)
        _FILTERS[:0] = [entry for entry in self.filters if entry not in before.filters]
        sys.path += [entry for entry in self.path if entry not in before.path and entry not in sys.path]
        for name, hook in self.hooks.items():
            if hook is not before.hooks[name] and getattr(sys, name) is before.hooks[name]:
                setattr(sys, name, hook)
        if self.cwd is not None and self.cwd != before.cwd and _cwd() == before.cwd:
            os.chdir(self.cwd)


class _Log:
    """How the root logger is set up; of two who call ``logging.basicConfig()``, the first counts."""

    def __init__(self) -> None:
        self._root: Any = getattr(sys.modules.get("logging"), "root", None)
        # A script may have a module of that name itself.
        self._handlers = list(getattr(self._root, "handlers", ()))
        self._level = getattr(self._root, "level", _WARNING)

    def undo(self, before: _Log) -> None:
        """Put it as it was earlier, or as it is once logging has been loaded."""
        if self._differs(before):
            self._root.handlers[:] = before._handlers
            self._root.setLevel(before._level)

    def follow(self, before: _Log) -> None:
        """Put it as it is here, unless the script has set it up since."""
        if self._differs(before) and self._root.handlers == before._handlers:
            self._root.handlers[:] = self._handlers
            if self._root.level == before._level:
                self._root.setLevel(self._level)

    def _differs(self, before: _Log) -> bool:
        return (self._handlers, self._level) != (before._handlers, before._level)


class _Kept:
    """What some modules keep, of those that are loaded."""

    def __init__(self) -> None:
        self._values: dict[str, tuple[Any, Any]] = {}
        for name in _KEPT:
            module = sys.modules.get(name)
            try:
                self._values[name] = module, _KEPT[name][0](module)
            except Exception:  # noqa: BLE001, S112 - not loaded, not wholly, or a script's own module of that name
                continue

    def undo(self, before: _Kept) -> None:
        """Have the modules that were there earlier keep what they kept then."""
        for name, (module, was, became) in self._changes(before).items():
            if became != was:
                _KEPT[name][1](module, was)

    def follow(self, before: _Kept) -> None:
        """Have them keep what they do here, unless the script has changed it since."""
        for name, (module, was, became) in self._changes(before).items():
            if became != was and _KEPT[name][0](module) == was:
                _KEPT[name][1](module, became)

    def _changes(self, before: _Kept) -> dict[str, tuple[Any, Any, Any]]:
        there = {name: (module, before._values.get(name), now) for name, (module, now) in self._values.items()}
        return {
            name: (module, earlier[1], now)
            for name, (module, earlier, now) in there.items()
            if earlier is not None and earlier[0] is module
        }


class _Group:
    """What one import has loaded and changed."""

    def __init__(self, modules: dict[str, ModuleType], before: _State) -> None:
        self.modules = modules
        self._before = before
        self._after = _State()
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
    """Finds what is hidden, first of all finders, until everything is back."""

    def __init__(self, groups: list[_Group]) -> None:
        self._groups = groups
        self._lock = _thread.RLock()

    def find_spec(self, name: str, _path: object = None, _target: object = None) -> ModuleSpec | None:
        """Return what brings the module back; to look for it is not to import it, and changes nothing."""
        for group in self._groups:
            module = group.modules.get(name)
            if module is not None:
                return self._spec(name, module)
        return None

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


def _handler(number: int) -> Any:
    try:
        return _signal.getsignal(number)
    except ValueError:  # there is no such signal here
        return None


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except FileNotFoundError:  # it has been removed
        return None
