"""What a checkup makes of what the nodes have answered: all is well, or what is wrong on which of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from nvflare_torchrun_plugin import wire
from nvflare_torchrun_plugin.launching.launch import Launch
from nvflare_torchrun_plugin.supervision import agreement
from nvflare_torchrun_plugin.verdict import Verdict

OK, FAILED, SKIPPED = "ok", "failed", "skipped"

_ADVICE = ": give node rank 0 an address that it knows (--master-addr, address)"


@dataclass(frozen=True)
class Check:
    """One thing that was tried.

    Attributes:
        name: what.
        state: ``ok``, ``failed``, or ``skipped`` because something before it has failed.
        detail: what was found; or what is wrong on which node, and what to do.
        nodes: hosts on which it failed.
    """

    name: str
    state: str
    detail: str
    nodes: tuple[str, ...] = ()

    @classmethod
    def of(cls, name: str, wrong: Mapping[str, str], found: str) -> Check:
        """Return a check that has failed if anything is wrong, by host; else what was found."""
        if wrong:
            return cls(name, FAILED, "; ".join(wrong.values()), tuple(wrong))
        return cls(name, OK, found)


def each(names: Sequence[str], values: Sequence[str]) -> str:
    """Return every node's name with its value."""
    return "; ".join(f"{name} {value}" for name, value in zip(names, values, strict=True))


def versions(nodes: Sequence[agreement.Found]) -> Check:
    """Look at what is installed on the nodes, in the order of their ranks."""
    first_host, first, _ = nodes[0]
    others = list(enumerate(nodes))[1:]
    wrong = {
        host: text
        for _, (host, hello, _) in others
        if (text := agreement.disagrees(first_host, first, host, hello))
    }
    may_differ = [
        text
        for node_rank, (host, hello, _) in others
        for text in agreement.differences(first_host, first, node_rank, host, hello)
    ]
    text = f"this package {first.version}, torch {first.torch}, nvflare {first.nvflare}, Python {first.python}"
    return Check.of("versions", wrong, "; ".join([text, *may_differ]))


def cores_and_gpus(nodes: Sequence[agreement.Found], wanted: Sequence[int | str]) -> Check:
    """Count what the nodes have.

    Args:
        nodes: in the order of their ranks.
        wanted: the processes that each is to run.
    """
    gpu_host = agreement.host_with_gpus(nodes)
    wrong = {
        host: f"{host}: {text}"
        for (host, hello, _), number in zip(nodes, wanted, strict=True)
        if (text := agreement.lacks_gpu(hello, number, gpu_host))
    }
    counted = [f"{hello.cores} cores, {_gpus(hello)}" for _, hello, _ in nodes]
    return Check.of("cores and GPUs", wrong, each([host for host, _, _ in nodes], counted))


def shared_directory(nodes: Sequence[agreement.Found], directory: Path, stage: str) -> Check:
    """Look who sees the directory.

    Args:
        nodes: in the order of their ranks.
        directory: the one that they should share.
        stage: whether those that do not see it get a copy, as the node group says.
    """
    apart = [host for host, _, ready in nodes if not ready.shares]
    copied = f"{directory} is not seen by {', '.join(apart)}: they get a copy (stage: {stage})"
    wrong = {
        host: f"{host} does not see {directory}, and gets no copy (stage: never): share it, or copy it"
        for host in apart
        if stage == "never"
    }
    return Check.of("shared directory", wrong, copied if apart else f"{directory} is seen by all")


def master_address(nodes: Sequence[agreement.Found], launch: Launch) -> Check:
    """Look what the nodes take the master address for."""
    name = launch.contract.master_addr
    wrong = {host: f"{host}: {ready.error}{_ADVICE}" for host, _, ready in nodes if ready.error}
    if launch.spans_hosts:
        wrong |= {host: f"{host}: {text}" for host, _, ready in nodes[1:] if (text := agreement.misled(ready))}
    means = sorted({ready.address for _, _, ready in nodes if ready.address})
    return Check.of("master address", wrong, f"{name} means {', '.join(means)}" if name else "none: one node")


def connections(
    names: Sequence[str],
    places: Sequence[tuple[str, int]],
    results: Sequence[object],
    master_port_range: tuple[int, int],
) -> tuple[Check, Check]:
    """Look who can connect to node rank 0, and who to whom.

    Args:
        names: of the nodes, in the order of their ranks.
        places: where each listens.
        results: what each says of every place: null, or why it cannot connect; or a sentence that says why
            there is no answer.
        master_port_range: the ports that node rank 0 may take.
    """
    first, *others = names
    address = "{}:{}".format(*places[0])
    to_master: dict[str, str] = {}
    pairs: dict[str, str] = {}
    for name, result in zip(names, results, strict=True):
        if not isinstance(result, list) or len(result) != len(places):
            to_master[name] = f"{name}: its probe says: {result}"
            continue
        if result[0]:
            to_master[name] = f"{name} cannot connect to {first} at {address}: {result[0]}"
        missing = [
            f"{name} cannot connect to {other} at {place}: {why}"
            for other, (place, _), why in zip(others, places[1:], result[1:], strict=True)
            if why
        ]
        if missing:
            pairs[name] = "; ".join(missing)
    ports = "{} to {}".format(*master_port_range)
    _advise(to_master, f"give node rank 0 another address (--master-addr, address), or open its ports {ports}")
    _advise(pairs, "ranks connect to each other at any port, let the hosts of the group do so")
    number = len(places) * (len(places) - 1) // 2
    return (
        Check.of("master connected", to_master, f"by all nodes, at {address}"),
        Check.of("nodes connected", pairs, f"each to each, {number} pair{'s' * (number > 1)}"),
    )


def blame(names: Sequence[str], verdict: Verdict) -> dict[str, str]:
    """Return what went wrong in a run, by the name of its node; nothing when it went well.

    Args:
        names: of the nodes, in the order of their ranks.
        verdict: the run's.
    """
    if verdict.outcome == "ok" and not verdict.leftovers:
        return {}
    failure = verdict.failure
    if failure is None:
        return {names[0]: f"{verdict.reason or 'it ended early'} {' '.join(verdict.leftovers)}".strip()}
    said = failure.traceback.strip().splitlines()[-1:] if failure.traceback else failure.last_lines[-1:]
    rank = "" if failure.rank is None else f" rank {failure.rank}"
    name = names[failure.node_rank]
    return {name: f"{name}{rank}: {': '.join([failure.what, *said])}"}


def _advise(wrong: dict[str, str], advice: str) -> None:
    """Say what to do once, after the last of what is wrong."""
    if wrong:
        last = next(reversed(wrong))
        wrong[last] += f": {advice}"


def _gpus(hello: wire.Hello) -> str:
    return "accelerators that only torch can count" if hello.gpus is None else f"{hello.gpus} GPUs"
