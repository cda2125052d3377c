"""What importing may change in a process and a script can see, and how to put it back (standard library only)."""

from __future__ import annotations

# ruff: noqa: PTH109 - pathlib would be one more module that the script finds loaded
import _locale
import _signal  # type: ignore[import-not-found]  # of the interpreter itself; signal wraps it
import _socket
import _warnings
import builtins
import gc
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

_NSIG = 65
_WARNING = 30
"""The root logger's level to begin with."""
_NAMESPACES: tuple[dict[str, Any], ...] = (vars(sys), vars(builtins))
_LISTS = frozenset({"argv", "meta_path", "modules", "path", "path_hooks", "path_importer_cache"})
"""Of these it counts what is in them, if anything."""
_FILTERS: list[Any] = _warnings.filters
"""That of the module warnings, whether that is loaded or not."""


def _umask() -> int:
    mask = os.umask(0o077)
    os.umask(mask)
    return mask


_SETTINGS: tuple[tuple[Callable[[], Any], Callable[[Any], object]], ...] = (
    (_umask, os.umask),
    (sys.getdlopenflags, sys.setdlopenflags),
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
_KEPT: tuple[tuple[str, Callable[[Any], Any], Callable[[Any, Any], object]], ...] = (
    (
        "multiprocessing",
        lambda module: module.get_start_method(allow_none=True),
        lambda module, method: module.set_start_method(method, force=True),
    ),
    ("logging", lambda module: module.root.manager.disable, lambda module, level: module.disable(level)),
    (
        "warnings",
        lambda module: (module.showwarning, module.formatwarning),
        lambda module, how: vars(module).update(showwarning=how[0], formatwarning=how[1]),
    ),
    ("threading", lambda module: module.excepthook, lambda module, hook: setattr(module, "excepthook", hook)),
    ("random", lambda module: module.getstate(), lambda module, state: module.setstate(state)),
    ("numpy", lambda module: module.geterr(), lambda module, how: module.seterr(**how)),
    (
        "numpy.random",
        lambda module: [getattr(part, "tolist", lambda part=part: part)() for part in module.get_state()],
        lambda module, state: module.set_state(tuple(state)),
    ),
    (
        "torch",
        lambda module: module.get_rng_state().tolist(),
        # Whatever the default device is.
        lambda module, state: module.set_rng_state(module.tensor(state, dtype=module.uint8, device="cpu")),
    ),
    *(
        (
            "torch",
            lambda module, learn=learn: getattr(module, learn)(),
            lambda module, value, make=make: getattr(module, make)(value),
        )
        for learn, make in (
            ("get_default_dtype", "set_default_dtype"),
            ("get_num_threads", "set_num_threads"),
            ("is_grad_enabled", "set_grad_enabled"),
            ("get_deterministic_debug_mode", "set_deterministic_debug_mode"),
            ("get_float32_matmul_precision", "set_float32_matmul_precision"),
        )
    ),
)
"""The same, of what modules keep to themselves that are at work for others."""


class State:
    """What importing may change and a script can see, at one moment."""

    def __init__(self) -> None:
        self.environ = dict(os.environ)
        self.handlers = {number: _handler(number) for number in range(1, _NSIG)}
        self.filters = list(_FILTERS)
        self.path = list(sys.path)
        self.argv = list(sys.argv)
        self.names = [dict(namespace) for namespace in _NAMESPACES]
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
        sys.argv[:] = self.argv
        for namespace, names in zip(_NAMESPACES, self.names, strict=True):
            for name in (set(namespace) | set(names)) - _LISTS:
                _put(namespace, name, names.get(name, _NONE))
        for (learn, make), value in zip(_SETTINGS, self.settings, strict=True):
            if learn() != value:
                make(value)
        if self.cwd is not None and _cwd() != self.cwd:
            os.chdir(self.cwd)

    def follow(self, before: State) -> None:
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
        if self.filters != before.filters:
            _FILTERS[:] = _followed(_FILTERS, before.filters, self.filters)
            _forget_warnings()
        sys.path[:] = _followed(sys.path, before.path, self.path)
        sys.argv[:] = _followed(sys.argv, before.argv, self.argv)
        for namespace, was_there, is_there in zip(_NAMESPACES, before.names, self.names, strict=True):
            for name in (set(was_there) | set(is_there)) - _LISTS:
                was, became = was_there.get(name, _NONE), is_there.get(name, _NONE)
                if became is not was and namespace.get(name, _NONE) is was:
                    _put(namespace, name, became)
        if self.cwd is not None and self.cwd != before.cwd and _cwd() == before.cwd:
            os.chdir(self.cwd)


_NONE = object()
"""In the place of a name that is not there."""


def _put(namespace: dict[str, Any], name: str, value: Any) -> None:
    if value is _NONE:
        namespace.pop(name, None)
    elif namespace.get(name, _NONE) is not value:
        namespace[name] = value


def _forget_warnings() -> None:
    """Have Python look again, with the filters that there are now, at what has been warned of before."""
    warnings: Any = _warnings
    if hasattr(warnings, "_filters_mutated"):
        warnings._filters_mutated()
        return
    # Python 3.14 or newer.
    warnings._acquire_lock()
    try:
        warnings._filters_mutated_lock_held()
    finally:
        warnings._release_lock()


def _followed(now: list[Any], was: list[Any], became: list[Any]) -> list[Any]:
    """Return a list with that done to it which has led from one to another."""
    if now == was:
        return became
    kept = [entry for entry in now if entry in became or entry not in was]
    added = [entry for entry in became if entry not in was and entry not in now]
    first = next((number for number, entry in enumerate(became) if entry in was), len(became))
    front = [entry for entry in added if entry in became[:first]]
    return [*front, *kept, *(entry for entry in added if entry not in front)]


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
        self._values: dict[int, tuple[Any, Any]] = {}
        for number, (name, learn, _) in enumerate(_KEPT):
            module = sys.modules.get(name)
            try:
                self._values[number] = module, learn(module)
            except Exception:  # noqa: BLE001, S112 - not loaded, not wholly, or a script's own module of that name
                continue

    def undo(self, before: _Kept) -> None:
        """Have the modules that were there earlier keep what they kept then."""
        for number, (module, was, became) in self._changes(before).items():
            if became != was:
                _KEPT[number][2](module, was)

    def follow(self, before: _Kept) -> None:
        """Have them keep what they do here, unless the script has changed it since."""
        for number, (module, was, became) in self._changes(before).items():
            if became != was and _KEPT[number][1](module) == was:
                _KEPT[number][2](module, became)

    def _changes(self, before: _Kept) -> dict[int, tuple[Any, Any, Any]]:
        there = {
            number: (module, before._values.get(number), now) for number, (module, now) in self._values.items()
        }
        return {
            number: (module, earlier[1], now)
            for number, (module, earlier, now) in there.items()
            if earlier is not None and earlier[0] is module
        }


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
