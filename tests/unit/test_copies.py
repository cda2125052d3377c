"""Copies of the job's folder on nodes whose agents do not do what agents do."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from standins import BOUND, HELLO, children, end, launch, says, until

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.supervision.copies import Copies

STAGED = wire.encode(wire.Staged("/the/copy")).decode().strip()


def test_a_connection_that_hangs_is_not_waited_for_again(tmp_path: Path) -> None:
    (tmp_path / "custom").mkdir()
    before = children()
    hangs = "if mkdir $1/first 2>&-; then exec sleep 1000; fi"
    agent = f"{hangs}; read prepare; read piece; read last; {says(HELLO, STAGED)}; read stop; {says(end(None))}"
    environ = {"PATH": os.environ["PATH"]}
    texts: list[str] = []

    async def place_twice() -> str:
        copies = Copies()
        once = launch(tmp_path, agent, join_timeout=0.5)
        argv = once.members[0].agent_argv
        with pytest.raises(asyncio.TimeoutError):
            await copies.place("host-1", argv, environ, once, texts.append)
        again = launch(tmp_path, agent)
        try:
            return await asyncio.wait_for(copies.place("host-1", argv, environ, again, texts.append), BOUND)
        finally:
            await copies.close()

    assert asyncio.run(place_twice()) == "/the/copy"
    assert texts == []
    until(lambda: children() <= before, "processes are left")
