"""What a run owes, whatever has happened to it."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise

from simulation import Simulator

from chaos.run import SITES, STEPS, Attempt, Chaos

_ABSENT = "no agent could be started there|did not arrive"
_BROKEN = r"its agent \(or \w+, which connects it\) ended"
_BLAME = {
    "rank": "SIGKILL",
    "agent": f"{_BROKEN}|{_ABSENT}",
    "client": f"{_BROKEN} with SIGKILL|{_ABSENT}",
    "cable": f"no sign of life|heard nothing|{_ABSENT}",
    # One that is back at once says that it knows nothing of any connection.
    "host": f"no sign of life|{_BROKEN}|{_ABSENT}",
}
"""What a verdict may say of each kind of fault."""


def wrongs(chaos: Chaos) -> list[str]:
    """Return a sentence for each thing that the run owed and did not give."""
    found = [*_of_server(chaos.simulator, chaos.rounds)]
    for attempt in chaos.attempts:
        found += [
            f"{attempt.site} round {attempt.round} {attempt.run_id}: {wrong}" for wrong in of_attempt(attempt)
        ]
    for site in SITES:
        for number in range(chaos.rounds):
            found += of_task(site, number, chaos.attempts)
    return found


def _of_server(simulator: Simulator, rounds: int) -> list[str]:
    """Every round has a result from every site, and the model is made of all of them."""
    said = simulator.messages("server")
    _, *parts = re.split(r"Round \d+ started", said)
    got = [Counter(re.findall(r"got result from client (\S+) for task: name=train", part)) for part in parts]
    found = [
        f"round {number}: results from {dict(each)}"
        for number, each in enumerate(got)
        if each != Counter([*SITES])
    ]
    found += [f"{len(got)} rounds of {rounds}"] if len(got) != rounds else []
    if "Finished FedAvg" not in said:
        return [*found, "the server has not finished"]
    model, owed = simulator.model(), [rounds * sum(STEPS.values()) / len(STEPS)]
    return found + ([f"the model is {model}, not {owed}"] if model != owed else [])


def of_attempt(attempt: Attempt) -> list[str]:
    """Its verdict blames something that has happened, and nothing is left of it."""
    if attempt.ended is None:
        return ["it has no verdict"]
    verdict = attempt.verdict()
    found = [f"survivors: {attempt.survivors}"] if attempt.survivors else []
    found += [
        f"left over: {left}"
        for left in verdict["leftovers"]
        if not any(f"({host}): it is not confirmed" in left for host in attempt.away)
    ]
    if verdict["outcome"] == "failed":
        host, what = verdict["failure"]["host"], verdict["failure"]["what"]
        possible = attempt.hits | {("cable", away) for away in attempt.away}
        if not any(host == at and re.search(_BLAME[kind], what) for kind, at in possible):
            found.append(f"blames {host}: {what}; what happened: {sorted(possible)}")
    elif verdict["outcome"] == "stopped" and not attempt.accepted:
        # NVFlare ends what takes too long to leave after its result; before that it has no reason.
        found.append(f"stopped: {verdict['reason']}")
    return found


def of_task(site: str, number: int, attempts: Sequence[Attempt]) -> list[str]:
    """All its attempts but the last one have failed, and only that one has brought a result."""
    accepted = [each.accepted for each in attempts if (each.site, each.round) == (site, number)]
    if accepted and accepted == [False] * (len(accepted) - 1) + [True]:
        return []
    return [f"{site} round {number}: attempts with an accepted result: {accepted}"]


def came_back(attempts: Sequence[Attempt]) -> set[str]:
    """Return the hosts that were hit, then missing in an attempt that brought a result, and used again later."""
    found = set()
    for site, hosts in SITES.items():
        own = [each for each in attempts if each.site == site]
        for host in hosts[1:]:
            struck = [number for number, each in enumerate(own) if any(host == at for _, at in each.hits)]
            later = [host in each.hosts() for each in own[min(struck, default=len(own)) :] if each.accepted]
            if (False, True) in pairwise(later):
                found.add(host)
    return found


def report(chaos: Chaos) -> str:
    """Return what happened, for people."""
    seconds = sorted(chaos.seconds)
    happened = Counter(each.fault.kind for each in chaos.attempts if each.fault is not None)
    failed = sum(each.ended is not None and each.verdict()["outcome"] == "failed" for each in chaos.attempts)
    sizes = Counter(len(each.hosts()) for each in chaos.attempts if each.accepted)
    back = sorted(came_back(chaos.attempts))
    middle = f"{seconds[len(seconds) // 2]:.1f}, most {seconds[-1]:.1f}" if seconds else "none"
    return "\n".join(
        [
            f"{len(seconds)} rounds, {len(chaos.attempts)} attempts, {failed} of them failed",
            f"seconds of a round: median {middle}",
            f"faults: {', '.join(f'{kind} {number}' for kind, number in sorted(happened.items())) or 'none'};"
            f" {len(chaos.pending)} found nothing to hit",
            f"results by the number of hosts: {dict(sorted(sizes.items()))}",
            f"hosts that were left out and then used again: {', '.join(back) or 'none'}",
        ]
    )
