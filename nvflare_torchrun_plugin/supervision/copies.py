"""The copies of the job's folder on nodes that do not share it, each kept by an agent until the run ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from nvflare_torchrun_plugin import node_agent, wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.node.staging import Archive, StagingError
from nvflare_torchrun_plugin.supervision.channel import Channel, sweep

_END_BOUND = 10.0
"""Seconds for an agent that keeps a copy to remove it and end, and again for its client when killed."""
CLOSE_BOUND = 2 * _END_BOUND + node_agent.SWEEP_BOUND + 1.0
"""Seconds in which :meth:`Copies.close` is done."""


@dataclass
class _Copy:
    """One node's copy and the agent that removes it when told, or when the client job is gone."""

    digest: str
    agent_argv: Sequence[str]
    environ: Mapping[str, str]
    tag: str
    channel: Channel
    serving: asyncio.Task[str]
    directory: asyncio.Future[str]


class Copies:
    """Serves all attempts of a run: a folder that has not changed is sent to a node once."""

    def __init__(self) -> None:
        self._copies: dict[str, _Copy] = {}

    async def place(
        self,
        host: str,
        agent_argv: Sequence[str],
        environ: Mapping[str, str],
        launch: Launch,
        on_text: Callable[[str], None],
    ) -> str:
        """Return the absolute path of the copy on the node.

        Args:
            host: the node.
            agent_argv: what starts an agent there.
            environ: the environment of the client that connects.
            launch: gives the app's directory, the name and the bounds.
            on_text: gets what the client says.

        Raises:
            StagingError: the folder cannot be packed, or did not arrive.
            asyncio.TimeoutError: it did not arrive within ``launch.join_timeout``.
        """
        archive = Archive(launch.cwd, launch.folder)
        copy = self._copies.get(host)
        if copy is None or copy.digest != archive.digest or copy.serving.done():
            if copy is not None:
                await self._end(copy)
            copy = self._copies[host] = self._open(archive.digest, agent_argv, environ, launch, on_text)
            copy.channel.post(wire.Prepare(None, launch.cwd, launch.marker, 0.0, launch.node_timeout))
            for piece in archive.pieces():
                copy.channel.post(wire.Stage(copy.tag, piece))
                await copy.channel.drained()
        await asyncio.wait(
            {copy.serving, copy.directory}, timeout=launch.join_timeout, return_when="FIRST_COMPLETED"
        )
        if copy.directory.done():
            return copy.directory.result()
        if copy.serving.done():
            raise StagingError(f"the job's folder did not arrive: {copy.serving.result() or 'its agent ended'}")
        # The next attempt connects anew: this client may hang as long as the run lasts.
        copy.digest = ""
        copy.channel.kill()
        raise asyncio.TimeoutError

    async def close(self) -> None:
        """Remove all copies."""
        await asyncio.gather(*(self._end(copy) for copy in self._copies.values()))
        self._copies.clear()

    def _open(
        self,
        digest: str,
        agent_argv: Sequence[str],
        environ: Mapping[str, str],
        launch: Launch,
        on_text: Callable[[str], None],
    ) -> _Copy:
        directory: asyncio.Future[str] = asyncio.get_running_loop().create_future()

        def on_frame(frame: wire.Frame) -> None:
            if isinstance(frame, wire.Staged) and not directory.done():
                directory.set_result(frame.directory)
            elif isinstance(frame, wire.End) and frame.error:
                on_text(frame.error)

        channel = Channel(agent_argv, environ, launch.node_timeout, on_frame, on_text)
        tag = f"{launch.name}-copy"
        return _Copy(digest, agent_argv, environ, tag, channel, asyncio.create_task(channel.run()), directory)

    async def _end(self, copy: _Copy) -> None:
        copy.channel.post(wire.Stop(0.0))
        await asyncio.wait({copy.serving}, timeout=_END_BOUND)
        copy.channel.kill()
        await asyncio.wait({copy.serving}, timeout=_END_BOUND)
        if copy.directory.done() and (not copy.serving.done() or copy.serving.result()):
            await sweep(copy.agent_argv, copy.environ, copy.tag, node_agent.SWEEP_BOUND)
