"""The timeline as one page of HTML: no scripts, nothing from elsewhere, for eyes, keyboards and screen readers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from datetime import datetime, timezone
from html import escape

from ..timeline import PHASES, NodeTime, Segment, TaskTime

__all__ = ["page"]

_LIGHT = ("#c8c8c8", "#8fa8c8", "#5b7db1", "#b39ddb", "#4db6ac", "#43a047", "#e0a030", "#a1887f")
_DARK = ("#5a5a5a", "#56708f", "#7fa3d8", "#8c77b8", "#3f9188", "#5cb860", "#c98f2a", "#85706a")
_TICKS = (1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 21600, 86400)

_STYLE = """
:root { color-scheme: light dark; --ink: #1a1a1a; --paper: #ffffff; --line: #767676; --bad: #c62828;
  --on-bad: #ffffff; %(light)s }
@media (prefers-color-scheme: dark) { :root { --ink: #eeeeee; --paper: #161616; --line: #8f8f8f; --bad: #ef5350;
  --on-bad: #000000; %(dark)s } }
body { margin: 1.5rem; font: 15px/1.45 system-ui, sans-serif; color: var(--ink); background: var(--paper); }
h1 { font-size: 1.4rem; } h2 { font-size: 1.15rem; margin-top: 2rem; }
ul.key { list-style: none; padding: 0; display: flex; flex-wrap: wrap; gap: .3rem 1.1rem; }
ul.key i { display: inline-block; width: 1em; height: 1em; margin-right: .4em; vertical-align: -.15em; }
table { border-collapse: collapse; width: 100%%; }
th, td { text-align: left; padding: .15rem .5rem; vertical-align: middle; }
th { font-weight: 600; white-space: nowrap; } .bars td:last-child { width: 62%%; padding-right: 0; }
.numbers td, .numbers th { border-bottom: 1px solid var(--line); }
.numbers td.n { text-align: right; font-variant-numeric: tabular-nums; }
.track { position: relative; height: 1.35rem; border-bottom: 1px dotted var(--line); }
.seg { position: absolute; top: 2px; bottom: 2px; min-width: 2px; }
.seg:focus-visible { outline: 3px solid var(--ink); z-index: 3; }
.ahead { opacity: .55;
  background-image: repeating-linear-gradient(45deg, transparent 0 4px, var(--paper) 4px 6px); }
.failed { background-color: var(--bad) !important; }
.seg b { display: none; position: absolute; left: 0; top: 1.3rem; z-index: 4; padding: .2rem .5rem;
  font-weight: 400; white-space: nowrap; color: var(--paper); background: var(--ink); border-radius: 3px; }
.seg:hover b, .seg:focus b { display: block; } .late b { left: auto; right: 0; }
.axis { position: relative; height: 1.3rem; font-size: .8rem; }
.axis span { position: absolute; border-left: 1px solid var(--line); padding-left: .2rem; white-space: nowrap; }
.mark { border: 1px solid var(--line); border-radius: 3px; padding: 0 .35rem; font-size: .85rem; }
.mark.bad { color: var(--on-bad); background: var(--bad); border-color: var(--bad); font-weight: 600; }
"""


def page(tasks: Sequence[TaskTime], source: str) -> str:
    """Return the page.

    Args:
        tasks: what :func:`nvflare_torchrun_plugin.timeline.read` has found, at least one.
        source: where, for its title.
    """
    begins = [part.begin for task in tasks for node in task.nodes for part in node.segments]
    axis = _Axis(min([*begins, *(task.begin for task in tasks)]), max(task.end for task in tasks))
    title = f"Where the time went: {escape(source)}"
    began = datetime.fromtimestamp(tasks[0].begin, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC")
    failed = sum(task.code not in (None, "OK") for task in tasks)
    count = f"{len(tasks)} {'task' if len(tasks) == 1 else 'tasks'}, {failed} failed"
    style = _STYLE % {"light": _colors(_LIGHT), "dark": _colors(_DARK)}
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; style-src 'unsafe-inline'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<main>
<h1>{title}</h1>
<p>First task at {began}; {count}. Hover over a stretch, or step through them with the Tab key, for its numbers;
a task that was tried again has a line for each attempt.</p>
{_key()}
<h2 id="bars">A bar per node and task</h2>
<table class="bars" aria-labelledby="bars">
<thead><tr><th scope="col">task</th><th scope="col">node</th><th scope="col">how</th>
<th scope="col">{axis.html()}</th></tr></thead>
<tbody>
{"".join(_bar(task, node, axis) for task in tasks for node in task.nodes or (None,))}</tbody>
</table>
<h2 id="numbers">The same in seconds</h2>
<table class="numbers" aria-labelledby="numbers">
<thead><tr><th scope="col">task</th><th scope="col">node</th><th scope="col">how</th>
{"".join(f'<th scope="col">{phase}</th>' for phase in PHASES)}</tr></thead>
<tbody>
{"".join(_numbers(task, node) for task in tasks for node in task.nodes)}</tbody>
</table>
</main>
</body>
</html>
"""


class _Axis:
    """The time that all bars share."""

    def __init__(self, begin: float, end: float) -> None:
        self._begin = begin
        self._span = max(end - begin, 0.001)

    def place(self, moment: float) -> float:
        """Return where the moment is, in percent of the width."""
        return 100 * (moment - self._begin) / self._span

    def since(self, moment: float) -> float:
        return moment - self._begin

    def html(self) -> str:
        days = _TICKS[-1] * math.ceil(self._span / 10 / _TICKS[-1])
        step = next((tick for tick in _TICKS if self._span / tick <= 10), days)
        ticks = "".join(
            f'<span style="left:{100 * number * step / self._span:.3f}%">{number * step} s</span>'
            for number in range(int(self._span * 0.96 // step) + 1)
        )
        return f'<div class="axis">{ticks}</div>'


def _colors(colors: Sequence[str]) -> str:
    return " ".join(f"--p{number}: {color};" for number, color in enumerate(colors))


def _key() -> str:
    items = [
        f'<li><i style="background-color:var(--p{number})"></i>{phase}</li>' for number, phase in enumerate(PHASES)
    ]
    items.append('<li><i class="ahead" style="background-color:var(--p1)"></i>hatched: ahead of its task</li>')
    items.append('<li><i class="failed"></i>red: ended in the failure</li>')
    return f'<ul class="key" aria-label="Key">{"".join(items)}</ul>'


def _head(task: TaskTime, node: NodeTime | None) -> str:
    words = [task.site, task.task, "" if task.round is None else f"round {task.round}"]
    words.append(f"try {task.number}" if task.number > 1 else "")
    name = "no group" if node is None else node.host if node.node_rank is None else f"{node.node_rank} {node.host}"
    how = f'<span class="mark">{task.start}</span>'
    if node is not None and node.failure is not None:
        how += f' <span class="mark bad">✗ {escape(node.failure)}</span>'
    elif node is not None and node.node_rank is None:
        how += ' <span class="mark">left out</span>'
    elif task.code != "OK":
        how += f' <span class="mark">{escape(task.outcome)}</span>'
    title = escape(" ".join(word for word in words if word) or task.group or "group")
    return f'<th scope="row">{title}</th><td>{escape(name)}</td><td>{how}</td>'


def _bar(task: TaskTime, node: NodeTime | None, axis: _Axis) -> str:
    parts = "".join(_segment(part, node, axis) for part in node.segments) if node is not None else ""
    return f'<tr>{_head(task, node)}<td><div class="track">{parts}</div></td></tr>\n'


def _segment(part: Segment, node: NodeTime, axis: _Axis) -> str:
    left = axis.place(part.begin)
    words = [f"{part.phase} {part.seconds:.1f} s", f"from {axis.since(part.begin):.1f} s on"]
    words += ["ahead of its task"] if part.ahead else []
    words += [f"ended in the failure: {node.failure}"] if part.failed and node.failure is not None else []
    words.append(f"node {node.host}, {node.ranks} rank{'' if node.ranks == 1 else 's'}")
    text = escape(", ".join(words))
    classes = " ".join(["seg", *["ahead"] * part.ahead, *["failed"] * part.failed, *["late"] * (left > 50)])
    place = f"left:{left:.3f}%;width:{axis.place(part.end) - left:.3f}%"
    color = f"background-color:var(--p{PHASES.index(part.phase)})"
    return (
        f'<span class="{classes}" style="{place};{color}" tabindex="0" role="img" aria-label="{text}">'
        f'<b aria-hidden="true">{text}</b></span>'
    )


def _numbers(task: TaskTime, node: NodeTime) -> str:
    cells = "".join(
        f'<td class="n">{seconds:.1f}</td>' if (seconds := node.seconds(phase)) else '<td class="n"></td>'
        for phase in PHASES
    )
    return f"<tr>{_head(task, node)}{cells}</tr>\n"
