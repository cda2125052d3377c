"""Prints one table about a finished simulator run of this example, read from what the run has left behind.

python summary.py WORKSPACE

It ends with code 1 if the run did not finish all of its rounds.
"""

import json
import re
import sys
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

import torch
from data import load
from model import DigitNet

TRAINED = re.compile(
    r"(?P<site>\S+): round (?P<round>\d+), (?P<processes>\d+) processes on (?P<nodes>\d+) nodes, "
    r".*global accuracy (?P<accuracy>[0-9.]+)"
)


def log(workspace: Path, who: str) -> Iterator[tuple[datetime, str]]:
    """Time and message of each entry in the JSON log of the server or of a site."""
    for line in (workspace / who / "log.json").read_text().splitlines():
        entry = json.loads(line)
        yield datetime.strptime(entry["asctime"], "%Y-%m-%d %H:%M:%S,%f"), entry["message"]


def round_starts(workspace: Path) -> list[datetime]:
    """When each round started, and last, when the workflow ended."""
    started = re.compile(r"Round \d+ started|Finished FedAvg")
    return [when for when, message in log(workspace, "server") if started.search(message)]


def reports(workspace: Path) -> dict[int, list[dict[str, str]]]:
    """What the sites' scripts printed after training, by round."""
    found: dict[int, list[dict[str, str]]] = {}
    for site in sorted(workspace.glob("site-*")):
        for _, message in log(workspace, site.name):
            match = TRAINED.search(message)
            if match:
                found.setdefault(int(match["round"]), []).append(match.groupdict())
    return found


def accuracy(file: Path) -> float:
    """The accuracy, on the held-out images, of a model that NVFlare has kept."""
    kept = torch.load(file, weights_only=True)
    net = DigitNet()
    net.load_state_dict({name: torch.as_tensor(value) for name, value in kept["model"].items()})
    images, labels = load(site=0, sites=1)[1].tensors
    return float((net(images).argmax(dim=1) == labels).float().mean())


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        sys.exit("usage: python summary.py WORKSPACE")
    workspace = Path(sys.argv[1])
    if not (workspace / "server" / "log.json").exists():
        sys.exit(f"{workspace} is no workspace of a simulator that has run: it has no server/log.json")
    times = round_starts(workspace)
    by_round = reports(workspace)
    rounds = len(times) - 1
    if rounds < 1 or sorted(by_round) != list(range(rounds)):
        sys.exit(
            f"the run in {workspace} is not complete: the server's log has {max(rounds, 0)} finished rounds, "
            f"the sites' logs have the rounds {sorted(by_round)}"
        )
    # In each round the sites measure the model that they receive: the result of the round before.
    final = accuracy(workspace / "server" / "simulate_job" / "app_server" / "FL_global_model.pt")
    measured = [*(float(by_round[n][0]["accuracy"]) for n in range(rounds)), final]
    print(" round  sites  nodes per site  processes per site  accuracy  seconds")
    print(f" start{measured[0]:>53.4f}")
    for n in range(rounds):
        sites = by_round[n]
        nodes = "/".join(sorted({site["nodes"] for site in sites}))
        processes = "/".join(sorted({site["processes"] for site in sites}))
        seconds = (times[n + 1] - times[n]).total_seconds()
        print(f"{n:>6} {len(sites):>6} {nodes:>15} {processes:>19} {measured[n + 1]:>9.4f} {seconds:>8.1f}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
