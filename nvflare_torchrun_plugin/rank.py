"""What torchrun starts for each rank: it takes its orders from the node agent and becomes the script.

``python -u -m nvflare_torchrun_plugin.rank ...`` runs a script, or a module, so that it finds what
``python -u SCRIPT ARGS...`` (torchrun's own command line) would have given it (``run_program.py``). The words
after the module's name are for readers of ``ps``; what to run comes over the agent's socket, in the directory
that the environment variable ``NVFL_AGENT_DIR`` names (``agent_link.py``).

At the end of the script, however it ends, the rank leaves NVFlare's Client API if the script joined it. The
API's threads are not daemons: after an uncaught exception they would keep the process alive until NVFlare's
``heartbeat_timeout``.

A rank that is started ahead of its task (warm start) imports what the script will need, and waits for the agent's
word before it goes on; what importing has changed is not seen before the script imports it (``preloading.py``).

What a script can still see: the call stack below its first frame (``traceback.print_stack()``; a few frames
less until ``RecursionError``), ``runpy`` and what that imports in ``sys.modules``, one more open descriptor,
and ``/proc/self/cmdline``.

Only the standard library is used, and most of it is imported late: see :func:`main`.
"""

from __future__ import annotations

# ruff: noqa: PTH109 - pathlib would be one more module that the script finds loaded
import _signal  # type: ignore[import-not-found]  # what Python itself has loaded
import os
import sys

from nvflare_torchrun_plugin.ranks import task_on_its_way
from nvflare_torchrun_plugin.ranks.agent_link import Agent, AgentError
from nvflare_torchrun_plugin.ranks.run_program import become_main, is_path_safe, run_program

_PACKAGE = "nvflare_torchrun_plugin"
_MODULE = f"{_PACKAGE}.rank"


def _leave_nvflare() -> None:
    """End the session with NVFlare if the script made one; what goes wrong in it is only told on stderr."""
    if getattr(sys.modules.get("nvflare.client.api"), "default_context", None) is None:
        return
    flare = sys.modules["nvflare.client"]
    try:
        task_on_its_way.let_arrive(flare)
        flare.shutdown()
    except BaseException as error:  # noqa: BLE001 - how the script ended must stay what the process says
        try:
            sys.stderr.write(f"leaving NVFlare's Client API failed: {type(error).__name__}: {error}\n")
        except Exception:  # noqa: BLE001 - a stream of the script's own
            return


def _forget(names: list[str]) -> None:
    """Take modules out of ``sys.modules``: a script may have its own of that name, and must not find ours.

    They stay alive for whoever has bound them before, as this package's modules have each other.
    """
    for name in names:
        parent, _, child = name.rpartition(".")
        module = sys.modules.pop(name)
        if getattr(sys.modules.get(parent), child, None) is module:
            delattr(sys.modules[parent], child)


def main() -> None:
    """Take the orders and run them.

    While this package imports what it needs, the working directory, which Python put in front of ``sys.path``
    for ``-m``, is not looked at: the modules there are the script's.
    """
    path0: list[str] = []
    try:
        if not is_path_safe() and sys.path[0] == os.getcwd():
            path0 = [sys.path.pop(0)]
    except FileNotFoundError:  # the working directory has been removed; Python put nothing there
        path0 = []
    names = list(sys.modules)
    try:
        agent = Agent(os.environ)
        orders = agent.receive_orders()
        if orders.preload is not None:
            # Later it would be one more module that the script finds loaded.
            from nvflare_torchrun_plugin.ranks import preloading
    except AgentError as error:
        sys.stderr.write(f"rank {os.environ.get('RANK') or '?'}: {error}\n")
        raise SystemExit(2) from None
    # A scheduler's notice is the script's business: what the agent ignores, and torchrun after it, is so no more.
    for number in (_signal.SIGUSR1, _signal.SIGUSR2):
        _signal.signal(number, _signal.SIG_DFL)
    # The package itself, and what it imported so far: names are in the order of import.
    _forget(list(sys.modules)[names.index(_PACKAGE) :])
    first = sys.orig_argv.index(_MODULE) - 1 if _MODULE in sys.orig_argv else len(sys.orig_argv)
    sys.orig_argv[first:] = [*(["-m"] if orders.module else []), orders.target, *orders.args]

    def at_end(text: str) -> None:
        if text:
            agent.report_uncaught(text)
        _leave_nvflare()

    namespace = become_main(orders)
    if orders.preload is not None:
        try:
            preloading.preload(orders, path0, agent)
        except AgentError as error:
            sys.stderr.write(f"rank {os.environ.get('RANK') or '?'}: {error}\n")
            raise SystemExit(2) from None
    run_program(orders, path0, namespace, at_end)


if __name__ == "__main__":
    main()
