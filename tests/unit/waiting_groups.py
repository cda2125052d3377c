"""Stand-in agents whose ranks wait for their task, and the tasks that come for them."""

from __future__ import annotations

import dataclasses
import os
import subprocess
from pathlib import Path
from typing import Any

from stage import RELAY, Stage
from standins import HELLO, READY, end, launch, until

from nvflare_torchrun_plugin import relay, wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision.attempt import Attempt
from nvflare_torchrun_plugin.supervision.group_ahead import Ahead


def lines(*frames: wire.Frame | str) -> str:
    """Return shell code that prints the frames."""
    texts = [frame if isinstance(frame, str) else wire.encode(frame).decode().strip() for frame in frames]
    return "printf '%s\\n' " + " ".join(f"'{text}'" for text in texts)


def holds(rank: int, *, after_go: str = "") -> str:
    """A stand-in agent with one rank that waits; it keeps its orders, and ends well whatever the next
    one is; after "go" once the result has been accepted.

    Files in its folder change it: ``missing``, ``silent`` or ``killed`` (its rank), with the rank's number.
    """
    killed = lines(wire.RankEnd(rank, -9, 1e9, False, 0), end(1))
    ended = (
        f"while ! [ -e $1/accepted ]; do sleep 0.05; done; {lines(wire.RankEnd(rank, 0, 1e9, False, 0), end(0))}"
    )
    keep = """printf '%s\\n' "$order" > $1/"""
    return f"""
        beat() {{
            if [ -e $1/killed{rank} ]; then {killed}; exit; fi
            [ -e $1/silent{rank} ] || {lines(wire.Beat())}
        }}
        get() {{
            while read -r order; do case "$order" in
                *'"ping"'*) beat $1 ;;
                *'"sweep"'*) {lines(end(0))}; exit ;;
                *) return ;;
            esac; done
        }}
        [ -e $1/missing{rank} ] && exit 3
        get $1; {lines(HELLO, READY)}
        get $1; {keep}start{rank}
        {lines(wire.RankUp(rank, 0, 1), wire.Warm(rank, 1, ()))}
        get $1; {keep}next{rank}
        case "$order" in *'"go"'*) {after_go or ended};; *) {lines(end(0, stopped=True))};; esac
    """


def warm(folder: Path, *agents: str, name: str = "ahead", **how: Any) -> Launch:
    return dataclasses.replace(launch(folder, *agents, **how), preload=("json",), name=name)


def order(folder: Path, name: str) -> wire.Order:
    path = folder / name
    until(lambda: path.exists() and path.read_bytes().endswith(b"\n"), f"{name} never came")
    return wire.decode_order(path.read_bytes())


def environ() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name != relay.DIR_VARIABLE}


def comes(stage: Stage, **more: str) -> subprocess.Popen[bytes]:
    """A task's relay."""
    return subprocess.Popen(RELAY, env={**stage.environ(), **more})


def accept(stage: Stage, attempt: Attempt) -> None:
    attempt.accept()
    (stage.folder / "accepted").touch()


def no_cold() -> Launch:
    raise AssertionError("it was to start warm")


def wait_until_it_waits(stage: Stage, ahead: Ahead) -> None:
    until(lambda: any(f"{ahead.launch.name}: waiting" in line for line in stage.lines), "it does not wait")
