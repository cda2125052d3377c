"""What a script imports at its top, read without running it: a rank can import that before its task comes."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator, Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

NVFLARE = "nvflare_torchrun_plugin.ranks.nvflare_ahead"
"""Imports what NVFlare's Client API imports only once a session begins."""
SHARDED = "torch.distributed.checkpoint.state_dict"
"""Imported late by ``load_model`` and ``full_params`` of :mod:`nvflare_torchrun_plugin.client`."""
_FRAMEWORK = "torch"
_PLUGIN = "nvflare_torchrun_plugin"
_CLIENTS = ("nvflare", _PLUGIN)
_VARIABLES = frozenset({"environ", "environb"})
_SETTINGS = _VARIABLES | {"putenv", "unsetenv", "load_dotenv"}
"""What a script sets with these, a library that is imported later may read as it is imported."""
_EFFECTS = frozenset(
    {
        *("modules", "meta_path", "path_hooks"),
        *("set_default_dtype", "set_default_device", "set_default_tensor_type"),
    }
)
"""With these a script decides what an import after it finds, or what tensors that makes."""
_TABLES = _VARIABLES | {"modules"}
_APPENDING = frozenset({"append", "extend"})
"""What a script adds to the end of ``sys.path`` hides nothing that is found without it."""


def ahead_of(target: str, *, module: bool, folders: Sequence[str]) -> tuple[str, ...]:
    """Return what the ranks of a script should import ahead, ``a.b`` or ``a:b`` for ``from a import b``.

    These are the modules that it names in import statements at its top, as far as the first statement that may set
    a variable of the environment, hide a module behind another one, or change PyTorch's default dtype or device;
    of modules of the job itself, those that they name. PyTorch and what NVFlare's Client API needs are among them,
    unless it sets variables or hides modules by ``sys.path``.

    Args:
        target: path of the script, or name of the module.
        module: whether it is a module's name.
        folders: where the job's own modules are.
    """
    path: str | None = target
    package = ""
    if not module:
        folders = [str(Path(target).resolve().parent), *folders]
    reader = _Reader(folders)
    if module:
        places = [*folders, *sys.path]
        spec = _find(target, places)
        path = spec.origin if spec is not None else None
        package = target.rpartition(".")[0]
        if spec is not None and spec.submodule_search_locations is not None:
            main = _find(f"{target}.__main__", places)
            path = main.origin if main is not None else None
            package = target
        if path is not None:
            reader.read_packages(package, places)
    if path is not None:
        reader.read(path, package, main=True)
    names = list(dict.fromkeys(reader.names))
    if not reader.stopped and not any(_top(name) == _FRAMEWORK for name in names):
        names.append(_FRAMEWORK)
    if not reader.stopped and any(_top(name) == _PLUGIN for name in names):
        names.append(SHARDED)
    if not reader.stopped and any(_top(name) in _CLIENTS for name in names):
        names.append(NVFLARE)
    return tuple(names)


def _top(name: str) -> str:
    return name.partition(":")[0].partition(".")[0]


def _find(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Return where a module is, without importing the packages that it is in."""
    spec = None
    search: Sequence[str] | None = path
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), search)
        search = spec.submodule_search_locations if spec is not None else None
        if spec is None or (search is None and count < len(parts)):
            return None
    return spec


class _Reader:
    """Collects the names, in the order in which the script would import them.

    Attributes:
        names: so far.
        closed: whether a statement has come that what the script imports after it may notice.
        stopped: whether one has come after which importing anything ahead could make a difference.
    """

    def __init__(self, folders: Sequence[str]) -> None:
        self.names: list[str] = []
        self.closed = False
        self.stopped = False
        self._folders = folders
        self._read: set[str] = set()
        self._settings = set(_SETTINGS)
        self._effects = set(_EFFECTS)

    def read_packages(self, name: str, places: Sequence[str]) -> None:
        """Read a package, and before it those that it is in."""
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            inner = ".".join(parts[:count])
            spec = _find(inner, places)
            if spec is not None and spec.origin is not None:
                is_package = spec.submodule_search_locations is not None
                self.read(spec.origin, inner if is_package else inner.rpartition(".")[0])

    def read(self, path: str, package: str, *, main: bool = False) -> None:
        """Read one source file; what is none is passed over.

        Args:
            path: the file's.
            package: where a relative import in it begins.
            main: whether it is what the ranks run.
        """
        if path in self._read or not path.endswith(".py"):
            return
        self._read.add(path)
        try:
            tree = ast.parse(Path(path).read_bytes())
        except (OSError, SyntaxError, ValueError, RecursionError):
            return
        _learn_setters(tree, self._settings)
        _learn_setters(tree, self._effects)
        for statement in tree.body:
            if self.stopped:
                return
            for name in _named(statement, package):
                self._take(name)
            for part in _run_by(statement, main=main):
                self.stopped = self.stopped or _mentions(part, self._settings) or _moves_path(part)
                self.closed = self.closed or _mentions(part, self._effects)

    def _take(self, name: str) -> None:
        if self.stopped:
            return
        own = PathFinder.find_spec(_top(name), self._folders)
        if own is not None:
            self.read_packages(name.replace(":", "."), self._folders)
        elif not self.closed:
            self.names.append(name)


def _learn_setters(tree: ast.Module, setters: set[str]) -> None:
    """Add the names by which the module calls those of the set, and of its own functions and classes that do."""
    for statement in ast.walk(tree):
        if isinstance(statement, ast.ImportFrom):
            setters |= {alias.asname for alias in statement.names if alias.asname and alias.name in setters}
    unknown = [
        statement
        for statement in tree.body
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    while found := [statement for statement in unknown if _mentions(statement, setters)]:
        setters |= {statement.name for statement in found}
        unknown = [statement for statement in unknown if statement not in found]


def _named(statement: ast.stmt, package: str) -> Iterator[str]:
    if isinstance(statement, ast.Import):
        for alias in statement.names:
            yield alias.name
    elif isinstance(statement, ast.ImportFrom) and statement.module != "__future__":
        module = str(statement.module or "")
        if statement.level:
            parts = package.split(".")
            if not package or statement.level > len(parts):
                return
            module = ".".join([*parts[: len(parts) - statement.level + 1], *filter(None, [statement.module])])
        for alias in statement.names:
            yield module if alias.name == "*" else f"{module}:{alias.name}"


def _run_by(statement: ast.stmt, *, main: bool) -> Sequence[ast.stmt]:
    """Return what of a statement is run where it stands; of imports, what they import is read."""
    if isinstance(statement, (ast.Import, ast.ImportFrom, ast.FunctionDef, ast.AsyncFunctionDef)):
        return []
    if isinstance(statement, ast.ClassDef):
        return [part for inner in statement.body for part in _run_by(inner, main=main)]
    guarded = isinstance(statement, ast.If) and any(
        isinstance(node, ast.Name) and node.id == "__name__" for node in ast.walk(statement.test)
    )
    return [] if guarded and not main else [statement]


def _mentions(statement: ast.stmt, names: set[str]) -> bool:
    # To read a variable sets none.
    reads: set[ast.expr] = set()
    for node in ast.walk(statement):
        if isinstance(node, ast.Compare):
            reads.update(node.comparators)
        elif (isinstance(node, ast.Attribute) and node.attr == "get") or (
            isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Load)
        ):
            reads.add(node.value)
    for node in ast.walk(statement):
        name = node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else ""
        if name in names and not (name in _TABLES and node in reads):
            return True
    return False


def _moves_path(statement: ast.stmt) -> bool:
    """Return whether a module of the same name may be found elsewhere after the statement."""
    found = 0
    for node in ast.walk(statement):
        if _is_path(node):
            found += 1
        elif (
            (isinstance(node, ast.Attribute) and node.attr in _APPENDING and _is_path(node.value))
            or (isinstance(node, ast.Compare) and any(_is_path(value) for value in node.comparators))
            or (isinstance(node, ast.AugAssign) and _is_path(node.target))
        ):
            found -= 1
    return found > 0


def _is_path(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Attribute)
        and node.attr == "path"
        and isinstance(node.value, ast.Name)
        and node.value.id == "sys"
    )
