"""``make chaos``: the long run; ``SEED=...`` repeats the faults of an earlier one."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

from beds.ssh import SshBed
from simulation import in_folder
from ssh_groups import on_bed

from chaos import check, plan
from chaos.run import HOSTS, SITES, Chaos


def tell(text: str) -> None:
    print(time.strftime("%X"), text, flush=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="make chaos")
    parser.add_argument("--seed", type=int, default=secrets.randbelow(1 << 32))
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    if reason := SshBed.lacking():
        sys.exit(reason)
    folder = Path(tempfile.mkdtemp(prefix="chaos-"))
    own = folder / "own"
    own.mkdir()
    print(f"SEED={given.seed}, all that is left of it in {folder}", flush=True)
    faults = plan.draw(given.seed, given.rounds, tuple(SITES))
    with SshBed(HOSTS) as bed, on_bed(bed, folder, own), in_folder(folder) as simulator:
        chaos = Chaos(simulator, bed, faults, given.rounds, tell)
        chaos.run()
    wrongs = check.wrongs(chaos)
    if not check.came_back(chaos.attempts):
        wrongs.append("no host was used again after it had been left out")
    print(check.report(chaos), *wrongs, f"SEED={given.seed}", sep="\n")
    return 1 if wrongs else 0


if __name__ == "__main__":
    sys.exit(main())
