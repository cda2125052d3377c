"""Runs the benchmarks and writes ``benchmarks/RESULTS.md``; ``make bench`` starts it."""

from __future__ import annotations

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median

from benchmarks import arrival, failure, held, machine, many_nodes, model, translator, warm

RESULTS = Path(__file__).with_name("RESULTS.md")
LAUNCHES = 15
JOBS = int(os.environ.get("BENCH_JOBS", "3"))
ROUNDS = 3
STARTS = 9
TASKS = int(os.environ.get("BENCH_TASKS", "50"))
FAULTS = 10
MODELS = 5
ELSEWHERE = "Measured on another machine:"


def table(found: dict[str, list[float]], base: str) -> list[str]:
    """Markdown: median, range, and median beside that of ``base`` as a ratio and a difference."""
    reference = median(found[base])
    lines = [
        "| | median | fastest to slowest | ratio | difference |",
        "|---|---:|---:|---:|---:|",
    ]
    for name, took in found.items():
        middle = median(took)
        beside = "1 | " if name == base else f"{middle / reference:.2f} | {middle - reference:+.2f} s"
        lines.append(f"| {name} | {middle:.2f} s | {min(took):.2f} to {max(took):.2f} s | {beside} |")
    return lines


def faults() -> list[str]:
    """The section about groups that end early; what it promises is said beside what was measured."""
    lines = [
        "From the SIGKILL of a rank, or from the abort, until the verdict is there and every process of the group "
        f"is gone on all hosts: {failure.NODES} nodes with 1 process each, {FAULTS} of each, by turns. Ranks that "
        f"ignore SIGTERM have a grace of {failure.GRACE:g} s. The hosts are namespaces of this machine.",
        "",
        "| | median | fastest to slowest | at most |",
        "|---|---:|---:|---:|",
    ]
    for case, took in failure.measure(FAULTS).items():
        middle = median(took)
        kept = "" if middle <= case.limit else ", MISSED"
        lines.append(
            f"| {case.name} | {middle:.2f} s | {min(took):.2f} to {max(took):.2f} s | {case.limit:g} s{kept} |"
        )
    if (reason := failure.lacking()) is not None:
        lines += ["", f"Over ssh nothing was measured: {reason}."]
    return lines


def seconds(found: model.Found) -> dict[str, list[float]]:
    return {name: [took for took, _ in turns] for name, turns in found.items()}


def models() -> list[str]:
    """The section about the Client API on every rank."""
    size, ranks = model.NBYTES >> 20, model.RANKS
    local = model.one_node("broadcasts", MODELS)
    grown = max(memory for _, memory in local["receive()"]) / model.NBYTES
    lines = [
        f"{size} MiB in 64 tensors from rank 0 to {ranks} ranks of one node, from a barrier until the last rank "
        f"has it. {MODELS} of each, by turns, after one that does not count. With `receive()` the memory of all "
        f"ranks together grew by {grown:.2f} times the model.",
        "",
        *table(seconds(local), "one flat broadcast"),
        "",
    ]
    if (reason := model.lacking()) is None:
        lines += [
            "The same between 2 nodes with 2 ranks each; the nodes are namespaces of this machine.",
            "",
            *table(seconds(model.two_nodes(MODELS)), "one flat broadcast"),
            "",
        ]
    else:
        lines += [f"Between two nodes nothing was measured: {reason}.", ""]
    return [
        *lines,
        f"A model of {size} MiB under FSDP2 on {ranks} ranks, loaded from full parameters and gathered again.",
        "",
        *table(seconds(model.one_node("sharded", MODELS)), "torch's own"),
    ]


def launches() -> list[str]:
    return [
        "A script that does nothing, one process, one node: from starting the command to its end. "
        f"{LAUNCHES} launches of each, by turns, after one of each that does not count.",
        "",
        *table(translator.measure(LAUNCHES), "torchrun"),
    ]


def arrivals() -> list[str]:
    return [
        "From the moment a task reaches the site's executor until `flare.receive()` returns in the script: "
        f"one site, one node, {arrival.PROCESSES} processes, a tiny model, new processes for each task. "
        f"{JOBS} simulator jobs of {ROUNDS} rounds with each executor, by turns: {JOBS * ROUNDS} tasks each.",
        "",
        *table(arrival.measure(JOBS, ROUNDS), "NVFlare's executor and translator"),
    ]


def warm_starts() -> list[str]:
    found, theirs = warm.measure(JOBS, ROUNDS + 1), "NVFlare's executor and translator"
    return [
        f"The same, but each round trains for {warm.PAUSE:g} s, in which the next task's group can be started. "
        f"{JOBS} jobs of {ROUNDS + 1} rounds in each way, by turns; the first task of a job is left out: "
        f"{JOBS * ROUNDS} tasks each.",
        "",
        *table({name: [task.waited for task in tasks] for name, tasks in found.items()}, theirs),
        "",
        "The ends of the same tasks: from the call of `flare.send()` in the script until its result is "
        "accepted and the executor has returned.",
        "",
        *table({name: [task.returning for task in tasks] for name, tasks in found.items()}, theirs),
        "",
        "And from there until all processes of the task's group are gone.",
        "",
        *table(
            {
                name: left
                for name, tasks in found.items()
                if (left := [task.leaving for task in tasks if task.leaving is not None])
            },
            theirs,
        ),
    ]


def held_things() -> list[str]:
    found = held.measure(TASKS)
    lines = [
        f"What the client job holds in a row of {TASKS} tiny tasks, one process each, after {held.WARM_UP} that "
        f"do not count: medians of the first {held.TOGETHER} and of the last {held.TOGETHER}. Memory is what is "
        "left after a garbage collection; processes are those below the client job, files those of this package "
        "in the folder for temporary ones. NVFlare's executor starts a plain interpreter for each task.",
        "",
        f"| | memory, MiB | {' | '.join(held.WHAT[1:])} |",
        f"|---|{'---:|' * len(held.WHAT)}",
    ]
    for name, ends in found.items():
        first, last = ends["memory"]
        counts = " | ".join(f"{ends[what][0]:g} to {ends[what][1]:g}" for what in held.WHAT[1:])
        lines.append(f"| {name} | {first / 1024:.1f} to {last / 1024:.1f} | {counts} |")
    return lines


def nodes() -> list[str]:
    found, memory = many_nodes.measure(STARTS)
    plain, _ = found
    return [
        f"{many_nodes.NODES} local nodes, all at once, until every agent has answered that it can take part, "
        f"beside as many plain interpreters from start to end. {STARTS} of each, by turns. "
        f"The supervisor's memory grew by at most {memory / 1024:.0f} KiB per node.",
        "",
        *table(found, plain),
    ]


SECTIONS: dict[str, tuple[str, Callable[[], list[str]]]] = {
    "translator": ("Translator", launches),
    "arrival": ("Task arrival to model received", arrivals),
    "warm": ("Warm start", warm_starts),
    "held": ("What many tasks leave in the client job", held_things),
    "nodes": ("Many nodes", nodes),
    "models": ("A model on every rank", models),
    "faults": ("A fault, or an abort", faults),
}


def kept(top: Sequence[str]) -> dict[str, str]:
    """The sections by title that were measured before; those of another machine say so."""
    if not RESULTS.exists():
        return {}
    first, *sections = RESULTS.read_text().split("\n## ")
    before = [line for line in first.splitlines() if line.startswith("- ")]
    found = {title: body.strip() for title, _, body in (section.partition("\n") for section in sections)}
    return {
        title: (body if body.startswith(ELSEWHERE) else measured_on(before) + body).removeprefix(measured_on(top))
        for title, body in found.items()
    }


def measured_on(machine_lines: Sequence[str]) -> str:
    """What stands before a section that another machine than that of the page has measured."""
    return f"{ELSEWHERE} {'; '.join(line[2:] for line in machine_lines)}.\n\n"


def main(names: Sequence[str]) -> None:
    here = machine.describe()
    top = "\n".join(["# Results", "", "Written by `make bench`; run it again on your own machine.", "", *here])
    sections = kept(here)
    for name in names or SECTIONS:
        title, measure = SECTIONS[name]
        sections[title] = "\n".join(measure())
        # One by one: a run of all takes its time, and what is measured is measured.
        found = [f"## {title}\n\n{sections[title]}\n" for title, _ in SECTIONS.values() if title in sections]
        RESULTS.write_text("\n".join([f"{top}\n", *found]))
    print(RESULTS.read_text())


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="Measures, and writes benchmarks/RESULTS.md.")
    parser.add_argument("section", nargs="*", help=f"what to measure again, of {', '.join(SECTIONS)}; default all")
    asked = parser.parse_args().section
    if unknown := set(asked) - set(SECTIONS):
        parser.error(f"there is no section {unknown.pop()}")
    main(asked)
