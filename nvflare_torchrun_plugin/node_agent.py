"""The node agent: one small process per node that starts the translator, watches it and cleans up.

Orders come as lines on stdin, frames go out as lines on stdout (see :mod:`nvflare_torchrun_plugin.wire`).
The end of stdin means that the supervisor is gone or done: everything here ends, now. Standard library only;
what takes long to import is imported where it is used, for all nodes wait for the slowest greeting.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.node import agent_dir, node_facts, private_dir, procs, staging
from nvflare_torchrun_plugin.node.bootstrap import FILE_VARIABLE
from nvflare_torchrun_plugin.node.lines import LineCutter
from nvflare_torchrun_plugin.node.loop import CHUNK, Loop
from nvflare_torchrun_plugin.node.rank_port import RankPort

TYPE_CHECKING = False
if TYPE_CHECKING:
    import subprocess

NOTICES = (signal.SIGUSR1, signal.SIGUSR2)
"""What announces an end; Slurm (``sbatch --signal``) sends it to every process of a job's steps. It is for ranks:
agent and torchrun ignore it, and each rank begins by not ignoring it any more."""
INTERFACE_VARIABLES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
"""Where gloo and NCCL look for the network interface; a host's own name, their first idea, may be loopback."""
DEFAULT_GRACE = 4.0
"""Seconds between SIGTERM and SIGKILL before a start order has said otherwise."""
KILL_BOUND = 5.0
"""Seconds after the first SIGKILL until a process that is still there is reported as left over."""
DRAIN_BOUND = 5.0
"""Seconds for the last output to go out once every process is gone."""
SWEEP_BOUND = KILL_BOUND + DRAIN_BOUND + 5.0
"""Seconds for a new agent to end what another one left, the way to the node included."""
_STACKS_BOUND = 1.0
"""Seconds for the ranks to print their stacks."""
_ALONE = 0.3
"""Seconds for a torchrun without ranks: in its exit barrier it hears no SIGTERM, and the grace is the ranks'."""
_LOOK = 1.0
"""Seconds between two looks for ranks that have been stopped."""
_TICK = 0.05


def command(python: str) -> list[str]:
    """Return the argv that starts an agent with the node's interpreter."""
    return [python, "-m", "nvflare_torchrun_plugin.node_agent"]


def translator_words(directory: str, order: wire.Start) -> list[str]:
    """Return what the translator is started with.

    Args:
        directory: the agent's private one.
        order: what to start.
    """
    # torchrun makes a directory for each launch and leaves it; the job's own option goes after.
    return [f"--log-dir={directory}", *order.argv]


class Agent:
    """One group's part on one node, from the start order until nothing of it is left."""

    def __init__(self, orders: int, frames: int) -> None:
        self._orders = orders
        self._inbox = b""
        self._loop = Loop(frames)
        self._node_timeout = wire.DEFAULT_NODE_TIMEOUT
        self._heard = self._beaten = self._looked = time.monotonic()
        self._interface: str | None = None
        self._stage: staging.Incoming | None = None
        self._dir: str | None = None
        self._ranks: RankPort | None = None
        self._torchrun: subprocess.Popen[bytes] | None = None
        self._halted = 0.0
        self._code: int | None = None
        self._error: str | None = None
        self._grace = DEFAULT_GRACE
        self._signalled = False
        self._stopping: float | None = None
        self._terminate_at: float | None = None
        self._ended: float | None = None

    def run(self) -> None:
        """Serve until the group is gone and said so, or the other side is."""
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        for number in NOTICES:
            signal.signal(number, signal.SIG_IGN)
        self._loop.wake_on_signals()
        os.set_blocking(self._orders, False)
        self._loop.watch(self._orders, self._read_orders)
        # A login shell may have left a word without a newline before it.
        self._loop.send(b"\n")
        self._send(node_facts.hello())
        try:
            while self._stopping is None:
                self._loop.poll(min(self._node_timeout / wire.BEATS, _LOOK))
                self._collect()
                self._keep_alive()
                self._look_at_ranks()
                if self._signalled:
                    self._stop(self._grace)
            leftovers = self._end_everything(self._stopping)
            self._drain(lambda: self._loop.idle)
            stopped = self._ended is None
            at = self._stopping if self._ended is None else self._ended
            self._send(wire.End(self._code, leftovers, self._error, at, stopped))
            self._drain(lambda: self._loop.sent)
        finally:
            if self._dir is not None:
                private_dir.remove(self._dir)

    def _send(self, frame: wire.Frame) -> None:
        self._loop.send(wire.encode(frame))

    def _keep_alive(self) -> None:
        now = time.monotonic()
        if now - self._heard > self._node_timeout:
            # The far side of a cut network: nobody else will end these ranks.
            self._stop(self._grace)
        elif now - self._beaten >= self._node_timeout / wire.BEATS:
            self._beat()

    def _beat(self) -> None:
        self._beaten = time.monotonic()
        self._send(wire.Beat())

    def _look_at_ranks(self) -> None:
        now = time.monotonic()
        if self._ranks is not None and now - self._looked >= _LOOK:
            seconds = min(now - self._looked, 2 * _LOOK)
            self._ranks.look_for_halted(seconds, self._node_timeout)
            self._look_at_torchrun(seconds)
            self._looked = now

    def _look_at_torchrun(self, seconds: float) -> None:
        """End everything where torchrun has been stopped for too long after the end of its ranks."""
        assert self._ranks is not None  # noqa: S101
        if self._torchrun is None or not procs.is_stopped(self._torchrun.pid) or not self._ranks.all_ended():
            self._halted = 0.0
            return
        self._halted += seconds
        if self._halted >= self._node_timeout:
            self._error = (
                f"its torchrun was stopped (SIGSTOP) for {self._node_timeout:g} s after the end of its ranks"
            )
            self._ended = time.monotonic()
            self._stop(self._grace)

    def _on_signal(self, _number: int, _frame: object) -> None:
        self._signalled = True

    # -- orders ---------------------------------------------------------------------------------------------

    def _read_orders(self) -> None:
        data = os.read(self._orders, CHUNK)
        if not data:
            self._loop.forget(self._orders)
            self._stop(self._grace)
            return
        self._heard = time.monotonic()
        *lines, self._inbox = (self._inbox + data).split(b"\n")
        for line in lines:
            try:
                self._obey(wire.decode_order(line))
            except (ValueError, OSError) as e:
                self._error = self._error or str(e)
                self._ended = self._ended or time.monotonic()
                self._stop(self._grace)

    def _obey(self, order: wire.Order) -> None:
        if isinstance(order, wire.Prepare):
            self._prepare(order)
        elif isinstance(order, wire.Stage):
            self._take_piece(order)
        elif isinstance(order, wire.Ping):
            self._beat()
        elif isinstance(order, wire.Start):
            self._start(order)
        elif isinstance(order, wire.Go):
            self._go(order)
        elif isinstance(order, wire.Signal):
            if self._ranks is not None:
                self._ranks.signal(signal.Signals(order.number))
        elif isinstance(order, wire.Stop):
            self._stop(order.grace, stacks=order.stacks)
        else:
            agent_dir.sweep(order.tag, KILL_BOUND)
            self._stop(0)

    def _prepare(self, order: wire.Prepare) -> None:
        self._node_timeout = order.node_timeout
        shares = os.path.isfile(os.path.join(order.app_dir, order.marker))  # noqa: PTH113, PTH118 - see the top
        if order.master_addr is None:
            self._send(wire.Ready(shares, None, None, None))
            return
        import threading

        found: list[tuple[str | None, str]] = []
        done, writing = os.pipe()

        # A name server may take its time, and orders to end must be heard meanwhile.
        def ask(name: str) -> None:
            found.append(node_facts.find_master(name, order.timeout))
            os.close(writing)

        def answer() -> None:
            self._loop.forget(done)
            os.close(done)
            address, error = found[0]
            self._interface = node_facts.interface_towards(address) if address else None
            self._send(wire.Ready(shares, address, self._interface, error or None))

        self._loop.watch(done, answer)
        threading.Thread(target=ask, args=(order.master_addr,), daemon=True).start()

    def _take_piece(self, order: wire.Stage) -> None:
        if self._stage is None:
            self._stage = staging.Incoming(self._private_dir(order.tag))
        directory = self._stage.take(order.data)
        if directory is not None:
            self._send(wire.Staged(directory))

    def _private_dir(self, tag: str) -> str:
        if self._dir is None:
            self._dir = agent_dir.create(tag)
        return self._dir

    def _start(self, order: wire.Start) -> None:
        if self._torchrun is not None or self._stopping is not None:
            raise wire.WireError("start: an agent serves one group, and this one has had it")
        import subprocess

        procs.become_subreaper()
        oom_kills = node_facts.oom_kills()
        self._grace = order.grace
        if not os.path.isdir(order.cwd):  # noqa: PTH112 - pathlib is slower
            raise NotADirectoryError(
                f"there is no directory {order.cwd!r}, in which the ranks work: let the node have a copy of it"
                " (stage: auto, --copy), or share it"
            )
        environ = {**os.environ, **order.env}
        if self._interface is not None:
            for name in INTERFACE_VARIABLES:
                environ.setdefault(name, self._interface)
        directory = self._private_dir(order.tag)
        environ.update(agent_dir.variables(directory, order.tag))
        if order.bootstrap is not None:
            environ[FILE_VARIABLE] = _write_bootstrap(directory, order.bootstrap)
        output, theirs = os.pipe()
        try:
            self._ranks = RankPort(
                directory,
                order,
                os.fstat(theirs),
                self._loop,
                self._send,
                lambda: self._stopping is not None,
                lambda: node_facts.oom_kills() - oom_kills,
            )
            self._torchrun = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "nvflare_torchrun_plugin.torchrun_node",
                    *translator_words(directory, order),
                ],
                cwd=order.cwd,
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=theirs,
                stderr=theirs,
                start_new_session=True,
            )
        finally:
            os.close(theirs)
            cutter = LineCutter(wire.MAX_TEXT)
            self._loop.watch(output, lambda: self._read_torchrun(output, cutter), throttled=True)

    def _go(self, order: wire.Go) -> None:
        if self._stopping is not None:
            return
        if self._ranks is None or self._dir is None:
            raise wire.WireError("go: nothing has been started")
        environ = dict(order.env)
        if order.bootstrap is not None:
            environ[FILE_VARIABLE] = _write_bootstrap(self._dir, order.bootstrap)
        self._ranks.go(environ)

    def _read_torchrun(self, output: int, cutter: LineCutter) -> None:
        data = os.read(output, CHUNK)
        for text in cutter.feed(data) if data else cutter.flush():
            self._send(wire.Line(None, text))
            if self._ranks is not None:
                self._ranks.learn_from(text)
        if not data:
            self._loop.forget(output)
            os.close(output)

    # -- ending ---------------------------------------------------------------------------------------------

    def _stop(self, grace: float, *, stacks: bool = False) -> None:
        """Begin to end everything; a shorter grace given later counts."""
        self._grace = min(self._grace, grace) if self._stopping is not None else grace
        if self._stopping is None:
            self._stopping = time.monotonic()
            if stacks and self._ranks is not None:
                self._ranks.signal(signal.SIGABRT)
                self._terminate_at = self._stopping + _STACKS_BOUND
            else:
                self._terminate()

    def _terminate(self) -> None:
        self._terminate_at = None
        below = procs.descendants(os.getpid())
        procs.send_signal(below, signal.SIGTERM)
        # A stopped process takes its SIGTERM only when it runs again.
        procs.send_signal(below, signal.SIGCONT)

    def _end_everything(self, since: float) -> tuple[int, ...]:
        """Wait out the grace, then kill until nothing is left; return what could not be ended."""
        alone: float | None = None
        while True:
            self._collect()
            below = procs.descendants(os.getpid())
            now = time.monotonic()
            if self._terminate_at is not None and now >= self._terminate_at:
                since = now
                self._terminate()
            if not below or now >= since + self._grace + KILL_BOUND:
                return tuple(below)
            if self._torchrun is None or below != [self._torchrun.pid]:
                alone = None
            elif alone is None:
                alone = now
            if now >= since + self._grace or (alone is not None and now >= alone + _ALONE):
                # Again and again, for a process may fork while it is being looked for.
                procs.send_signal(below, signal.SIGKILL)
            self._loop.poll(_TICK)

    def _drain(self, done: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DRAIN_BOUND
        while not done() and time.monotonic() < deadline:
            self._loop.poll(_TICK)

    def _collect(self) -> None:
        """Collect ended children: torchrun, and orphans that became ours."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            code = os.waitstatus_to_exitcode(status)
            if self._torchrun is not None and pid == self._torchrun.pid:
                self._torchrun.returncode = self._code = code
                if self._stopping is None:
                    self._ended = time.monotonic()
                    if code == 0 and self._ranks is not None and not self._ranks.all_ended():
                        self._error = "torchrun ended with exit code 0 before its ranks"
                # What outlives torchrun has no owner: an orphaned rank, a forgotten child of a script.
                self._stop(self._grace)
            elif self._ranks is not None:
                self._ranks.learn_code(pid, code)


def _write_bootstrap(directory: str, text: str) -> str:
    file = f"{directory}/bootstrap.json"
    with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as opened:
        opened.write(text)
    return file


def main() -> None:
    """Serve the orders on stdin; with ``--join`` those that come by connections which this node opens."""
    if sys.argv[1:2] == ["--join"]:
        from nvflare_torchrun_plugin.joining import dial_in

        sys.exit(dial_in.main(sys.argv[2:]))
    if len(sys.argv) > 1:
        sys.exit(
            f"node_agent: unknown argument {sys.argv[1]!r}. A client job starts it, with orders on its stdin; on a"
            " node that dials in start it with --join (--join --help tells more)"
        )
    # Frames keep the real stdout to themselves: a stray print must not land between them.
    frames = os.dup(1)
    os.dup2(2, 1)
    Agent(0, frames).run()


if __name__ == "__main__":
    main()
