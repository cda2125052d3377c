"""Which faults a run meets; the same seed draws the same ones."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

KINDS = ("rank", "agent", "client", "cable", "host")
"""A rank, an agent, or the client that connects one (ssh) is killed; a host is cut off, or is gone."""
PHASES = ("starting", "joining", "training")
"""Phases of a group, as its log names them, in which something happens to it."""
MOST_PER_ROUND = 2
"""Most faults that a site meets in one round."""

_PER_ROUND = (0, 1, 1, MOST_PER_ROUND)
_LONGEST_DELAY_S = 2.0
# A short cut may go unnoticed; after a long one the others have trained without the host.
_AWAY_S = (0.5, 40.0)


@dataclass(frozen=True)
class Fault:
    """What happens.

    Attributes:
        round: from which round on; one that finds nothing to hit waits for a later attempt.
        site: to whose group.
        kind: one of ``KINDS``.
        phase: it happens ``delay`` seconds after its group has come to this one.
        delay: seconds.
        pick: from 0 to 1, which one of those that can be hit.
        away: seconds after which a host is there again.
    """

    round: int
    site: str
    kind: str
    phase: str
    delay: float
    pick: float
    away: float


def draw(seed: int, rounds: int, sites: Sequence[str]) -> list[Fault]:
    """Return the faults of a run in the order of their rounds."""
    rng = random.Random(seed)  # noqa: S311 - the point is that it can be repeated
    kinds = _dealt(rng)
    return [
        Fault(
            round=number,
            site=site,
            kind=next(kinds),
            phase=rng.choice(PHASES),
            delay=rng.uniform(0, _LONGEST_DELAY_S),
            pick=rng.random(),
            away=rng.uniform(*_AWAY_S),
        )
        for number in range(rounds)
        for site in sites
        for _ in range(rng.choice(_PER_ROUND))
    ]


def _dealt(rng: random.Random) -> Iterator[str]:
    """Yield kinds without end, none of them twice before each has come."""
    while True:
        yield from rng.sample(KINDS, len(KINDS))
