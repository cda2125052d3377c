"""How long 64 nodes of this host take until all of their agents have answered, beside as many plain processes.

Nothing but the agents is started: torchrun's own start has the same cost with any launcher.
"""

from __future__ import annotations

import asyncio
import os
import resource
import sys
import time

from nvflare_torchrun_plugin import node_agent, wire
from nvflare_torchrun_plugin.supervision.channel import Channel

NODES = 64
BOUND = 120.0


def _rss() -> int:
    """Bytes of memory that this process has in use."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * resource.getpagesize()


async def _plain() -> float:
    async def one() -> None:
        process = await asyncio.create_subprocess_exec(sys.executable, "-c", "pass")
        await process.wait()

    began = time.perf_counter()
    await asyncio.gather(*(one() for _ in range(NODES)))
    return time.perf_counter() - began


async def _nodes() -> tuple[float, float]:
    """Seconds until all nodes have answered, and bytes per node while all are there."""
    ready = [asyncio.Event() for _ in range(NODES)]

    def on_frame(number: int, frame: wire.Frame) -> None:
        if isinstance(frame, wire.Ready):
            ready[number].set()

    def open_channel(number: int) -> Channel:
        channel = Channel(
            node_agent.command(sys.executable), os.environ, 30.0, lambda frame: on_frame(number, frame), print
        )
        channel.post(wire.Prepare(None, "/", "marker", BOUND, 30.0))
        return channel

    before = _rss()
    began = time.perf_counter()
    channels = [open_channel(number) for number in range(NODES)]
    serving = [asyncio.create_task(channel.run()) for channel in channels]
    await asyncio.wait_for(asyncio.gather(*(event.wait() for event in ready)), BOUND)
    took = time.perf_counter() - began
    memory = (_rss() - before) / NODES
    for channel in channels:
        channel.post(wire.Stop(0.0))
    ends = await asyncio.wait_for(asyncio.gather(*serving), BOUND)
    if any(ends):
        raise RuntimeError(f"an agent did not end well: {max(ends)}")
    return took, memory


def measure(repeats: int) -> tuple[dict[str, list[float]], float]:
    """Seconds of ``repeats`` starts of each kind, by turns, after one that does not count; most bytes per node."""
    found: dict[str, list[float]] = {f"{NODES} x python -c pass": [], f"{NODES} nodes have answered": []}
    plain, nodes = found.values()
    most = 0.0
    for turn in range(repeats + 1):
        took_plain = asyncio.run(_plain())
        took_nodes, memory = asyncio.run(_nodes())
        most = max(most, memory)
        if turn:
            plain.append(took_plain)
            nodes.append(took_nodes)
            print(
                f"plain {took_plain:.2f} s, nodes {took_nodes:.2f} s, {memory / 1024:.0f} KiB per node", flush=True
            )
    return found, most
