"""Runs a script or a module as ``__main__``, so that it cannot tell (standard library only).

The rules are those of CPython 3.10 to 3.13: ``pymain_run_file`` and ``PyRun_SimpleFile`` for scripts, ``runpy``
for modules.
"""

from __future__ import annotations

# ruff: noqa: PTH109, PTH120 - pathlib would be one more module that the script finds loaded
import os
import sys
from _frozen_importlib_external import PathFinder

from nvflare_torchrun_plugin.ranks import uncaught

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from types import CodeType
    from typing import Any

    from nvflare_torchrun_plugin.ranks.agent_link import Orders


def run_program(
    orders: Orders, path0: list[str], namespace: dict[str, Any], at_end: Callable[[str], None]
) -> None:
    """Run the script or module as ``__main__``, and do at its end what Python does.

    Returns when the script has returned; else it raises what makes the interpreter end as the script asked.

    Args:
        orders: What to run.
        path0: What ``python -m`` puts in front of ``sys.path``: the working directory, or nothing.
        namespace: That of :func:`become_main`.
        at_end: Called with the text of an uncaught exception, or ``""``, once that has been printed; but not in
            a child that the script forked and that has come back here.

    Raises:
        SystemExit: the script's own; 1 after an uncaught exception; 2 for a script that is not there.
        KeyboardInterrupt: the script's own; it makes Python end by SIGINT.
    """
    namespace.pop("__file__", None)
    process = os.getpid()
    ended: BaseException | None = None
    try:
        if orders.module:
            _run_module(orders, path0)
        else:
            _run_path(orders, namespace)
    except BaseException as caught:  # noqa: BLE001 - whatever it is, it is dealt with below, outside of this handler
        ended = uncaught.without_frames_of(globals(), caught)
    text = ""
    if ended is not None and not isinstance(ended, SystemExit):
        error = ended
        ended = uncaught.print_uncaught(error) or error
        text = uncaught.as_python_prints(error)
        del error
    if not isinstance(ended, SystemExit) and namespace.get("__spec__") is None:
        # So does PyRun_SimpleFile: after a script (not a module) has ended other than by sys.exit(), its exit
        # handlers don't find them.
        namespace.pop("__file__", None)
        namespace.pop("__cached__", None)
    if os.getpid() == process:
        at_end(text)
    if ended is None:
        return
    try:
        if isinstance(ended, KeyboardInterrupt):
            sys.excepthook = uncaught.print_nothing
            raise ended
        if isinstance(ended, SystemExit):
            raise ended
        raise SystemExit(1)
    finally:
        # The traceback has this frame: such a cycle would keep the script's objects beyond their time.
        del ended


def become_main(orders: Orders) -> dict[str, Any]:
    """Put a new ``__main__`` in place, like the one Python starts with, and return its namespace."""
    import builtins

    sys.argv = ["-m" if orders.module else orders.target, *orders.args]

    module = type(sys)("__main__")
    namespace = module.__dict__
    if sys.version_info < (3, 14):
        namespace["__annotations__"] = {}
    namespace["__builtins__"] = builtins
    sys.modules["__main__"] = module
    return namespace


def _run_module(orders: Orders, path0: list[str]) -> None:
    import runpy

    sys.path[:0] = path0
    sys.argv[0] = "-m"
    # Python itself calls it for -m, by this name. The public run_module() would show in tracebacks.
    runpy._run_module_as_main(orders.target, True)  # type: ignore[attr-defined]  # see above


def foresee_main(orders: Orders) -> None:
    """Let what is imported ahead see where the script is, which it may ask for as it is imported.

    The path must be the script's.
    """
    path: str | None = _path_of(orders.target)
    if orders.module:
        path = sys.argv[0] = _origin(orders.target, None) or "-m"
    elif is_importable(orders.target):
        path = _origin("__main__", [orders.target])
    if path is not None:
        vars(sys.modules["__main__"])["__file__"] = path


def _origin(name: str, path: Sequence[str] | None) -> str | None:
    """Return the file that is run for ``python -m NAME``, without importing the packages that it is in."""
    spec = None
    parts = name.split(".")
    for count in range(1, len(parts) + 1):
        spec = PathFinder.find_spec(".".join(parts[:count]), path)
        path = spec.submodule_search_locations if spec is not None else None
        if path is None and count < len(parts):
            return None
    if path is not None:
        spec = PathFinder.find_spec(f"{name}.__main__", path)
    return spec.origin if spec is not None else None


def _path_of(target: str) -> str:
    try:
        return target if target.startswith("/") else f"{os.getcwd()}/{target}"
    except FileNotFoundError:  # the working directory has been removed
        return target


def _run_path(orders: Orders, namespace: dict[str, Any]) -> None:
    path = _path_of(orders.target)
    if is_importable(path):
        import runpy

        sys.path.insert(0, path)
        runpy._run_module_as_main("__main__", False)  # type: ignore[attr-defined]  # as in _run_module
        return
    if not is_path_safe():
        sys.path.insert(0, os.path.dirname(os.path.realpath(orders.target)))
    namespace["__file__"] = path
    namespace["__cached__"] = None
    try:
        file = open(path, "rb")  # noqa: SIM115 - closed before the script runs
    except OSError as error:
        reason = f"[Errno {error.errno}] {error.strerror}"
        sys.stderr.write(f"{sys.orig_argv[0]}: can't open file {path!r}: {reason}\n")
        raise SystemExit(2) from None
    with file:
        source = file.read()
    from importlib.machinery import SourceFileLoader, SourcelessFileLoader

    loader = (SourcelessFileLoader if path.endswith(".pyc") else SourceFileLoader)("__main__", path)
    namespace["__loader__"] = loader
    try:
        code = _compile(source, path) if isinstance(loader, SourceFileLoader) else loader.get_code("__main__")
        if code is None:
            _let_python_run(path, namespace)
        else:
            exec(code, namespace)  # noqa: S102 - this is what a rank is for
    finally:
        _flush("stderr")
        _flush("stdout")


def is_path_safe() -> bool:
    """Whether Python was told (``PYTHONSAFEPATH``, ``-P``, ``-I``) to put nothing in front of ``sys.path``."""
    return bool(getattr(sys.flags, "safe_path", sys.flags.isolated))  # -P came with Python 3.11


def is_importable(path: str) -> bool:
    """Whether the path is a directory or an archive, where Python runs the ``__main__.py`` in it."""
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _compile(source: bytes, path: str) -> CodeType | None:
    """Return the script's code, or None if it is not valid Python (or only looks so)."""
    try:
        if b"coding" not in b"".join(source.split(b"\n", 2)[:2]):
            source.decode()  # compile() does not look into comments
        # Without dont_inherit the script would get this file's "from __future__ import annotations".
        code: CodeType = compile(source, path, "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return None
    return code


def _let_python_run(path: str, namespace: dict[str, Any]) -> None:
    """Have Python parse the file itself: it words errors of encoding, and some others, unlike compile()."""
    import ctypes

    api = ctypes.pythonapi
    api.fopen.argtypes = [ctypes.c_char_p, ctypes.c_char_p]
    api.fopen.restype = ctypes.c_void_p
    run = api.PyRun_FileExFlags
    run.argtypes = [
        ctypes.c_void_p,
        ctypes.c_char_p,
        ctypes.c_int,
        ctypes.py_object,
        ctypes.py_object,
        ctypes.c_int,
        ctypes.c_void_p,
    ]
    run.restype = ctypes.py_object
    name = os.fsencode(path)
    file_input, close_it = 257, 1  # Py_file_input of Python.h
    run(api.fopen(name, b"rb"), name, file_input, namespace, namespace, close_it, None)


def _flush(name: str) -> None:
    try:
        getattr(sys, name).flush()
    except Exception:  # noqa: BLE001 - a stream of the script's own; Python ignores this too
        return
