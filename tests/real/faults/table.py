"""The table: one line for each fault, and the reasons for which the other combinations are not in it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from faults.inflict import Row

WHAT = ("rank", "torchrun", "agent", "relay", "transport", "CJ")
WHERE = (0, 1)
WHEN = ("before join", "after join", "in receive", "in training", "in send", "after acceptance")
HOW = ("exit 1", "exception", "SIGKILL", "SIGSTOP", "os._exit(0)", "closed channel")

# A torchrun that ends well enough to end its rank first is told of by whichever of the two the agent sees first.
GROUP = """
what      | node | when        | how                        | s  | blame
agent     | 0    | at start    | exit 1                     | 3  | node 0: no agent could be started there, node-0 ended with exit code 1
agent     | 1    | at start    | SIGKILL                    | 3  | node 1: no agent could be started there, node-1 ended with SIGKILL
agent     | 1    | at start    | os._exit(0)                | 3  | node 1: no agent could be started there, node-1 ended with exit code 0
agent     | 1    | at start    | SIGSTOP                    | 11 | node 1: no word from the agent within join_timeout, 8 s
transport | 1    | at start    | exit 1                     | 3  | node 1: no agent could be started there, python ended with exit code 1
transport | 1    | at start    | SIGSTOP                    | 11 | node 1: no word from the agent within join_timeout, 8 s
torchrun  | 0    | before join | exit 1                     | 3  | node 0: torchrun ended with exit code 1
torchrun  | 1    | before join | exit 1                     | 3  | node 1: torchrun ended with exit code 1
torchrun  | 1    | before join | SIGKILL                    | 3  | node 1: torchrun ended with SIGKILL
torchrun  | 1    | before join | os._exit(0)                | 3  | node 1: torchrun ended with exit code 0 before its ranks
torchrun  | 1    | before join | SIGSTOP                    | 18 | node 1: its torchrun has not joined the others within join_timeout
torchrun  | 0    | before join | SIGSTOP                    | 32 | node 0: its torchrun has not joined the others within join_timeout
agent     | 0    | before join | SIGKILL                    | 3  | node 0: its agent (or node-0, which connects it) ended with SIGKILL
agent     | 1    | before join | exit 1                     | 3  | node 1: its agent (or node-1, which connects it) ended with exit code 1
agent     | 1    | before join | SIGSTOP                    | 8  | node 1: no sign of life from it for 4 s (node_timeout)
transport | 1    | before join | SIGKILL                    | 3  | node 1: its agent (or python, which connects it) ended with SIGKILL
transport | 1    | before join | SIGSTOP                    | 8  | node 1: no sign of life from it for 4 s (node_timeout)
transport | 1    | before join | closed channel             | 3  | node 1: its agent (or python, which connects it) ended with exit code 1
rank      | 0    | after join  | exit 1                     | 3  | node 0 rank 0: exit code 1
rank      | 0    | after join  | exception                  | 3  | node 0 rank 0: exit code 1
rank      | 0    | after join  | SIGKILL                    | 3  | node 0 rank 0: SIGKILL
rank      | 0    | after join  | os._exit(0)                | 5  | node 0 rank 0: rank 0 ended with exit code 0, but no result was accepted
rank      | 0    | after join  | SIGSTOP                    | 8  | node 0 rank 0: stopped (SIGSTOP) for 4 s (node_timeout)
rank      | 1    | after join  | exit 1                     | 3  | node 1 rank 1: exit code 1
rank      | 1    | after join  | SIGKILL                    | 3  | node 1 rank 1: SIGKILL
rank      | 1    | after join  | os._exit(0)                | 3  | ok
torchrun  | 0    | after join  | SIGKILL                    | 3  | node 0: torchrun ended with SIGKILL
torchrun  | 1    | after join  | exit 1                     | 3  | node 1
torchrun  | 1    | after join  | os._exit(0)                | 3  | node 1: torchrun ended with exit code 0 before its ranks
rank      | 1    | in training | exit 1                     | 3  | node 1 rank 1: exit code 1
rank      | 1    | in training | exit 1 beside a deaf rank  | 4  | node 1 rank 1: exit code 1
rank      | 1    | in training | exception                  | 3  | node 1 rank 1: exit code 1
rank      | 1    | in training | SIGKILL                    | 3  | node 1 rank 1: SIGKILL
rank      | 1    | in training | SIGKILL beside a deaf rank | 4  | node 1 rank 1: SIGKILL
rank      | 1    | in training | SIGSTOP                    | 8  | node 1 rank 1: stopped (SIGSTOP) for 4 s (node_timeout)
rank      | 1    | in training | closed channel             | 5  | ok
torchrun  | 0    | in training | SIGKILL                    | 3  | node 0: torchrun ended with SIGKILL
torchrun  | 1    | in training | SIGKILL                    | 3  | node 1: torchrun ended with SIGKILL
torchrun  | 1    | in training | SIGTERM                    | 3  | node 1
torchrun  | 1    | in training | os._exit(0)                | 3  | node 1: torchrun ended with exit code 0 before its ranks
agent     | 0    | in training | SIGKILL                    | 3  | node 0: its agent (or node-0, which connects it) ended with SIGKILL
agent     | 1    | in training | exit 1                     | 3  | node 1: its agent (or node-1, which connects it) ended with exit code 1
agent     | 1    | in training | exception                  | 3  | node 1: its agent (or node-1, which connects it) ended with exit code 1
agent     | 1    | in training | SIGKILL                    | 3  | node 1: its agent (or node-1, which connects it) ended with SIGKILL
agent     | 1    | in training | SIGSTOP                    | 8  | node 1: no sign of life from it for 4 s (node_timeout)
agent     | 1    | in training | os._exit(0)                | 3  | node 1: its agent (or node-1, which connects it) ended with exit code 0
agent     | 1    | in training | SIGTERM                    | 3  | node 1: its agent got a signal to end there
transport | 1    | in training | SIGKILL                    | 3  | node 1: its agent (or python, which connects it) ended with SIGKILL
transport | 1    | in training | SIGSTOP                    | 8  | node 1: no sign of life from it for 4 s (node_timeout)
transport | 1    | in training | closed channel             | 3  | node 1: its agent (or python, which connects it) ended with exit code 1
"""  # noqa: E501 - one line for each fault

# A rank 0 without connections fails in its own send() after the seconds after which NVFlare gives up on it.
NVFLARE = """
what     | node | when             | how            | s  | blame
relay    | 0    | before join      | SIGKILL        | 3  | its relay is gone
relay    | 0    | after join       | exit 1         | 3  | its relay is gone
rank     | 0    | in receive       | exit 1         | 5  | node 0 rank 0: exit code 1
rank     | 0    | in receive       | exception      | 5  | node 0 rank 0: exit code 1
rank     | 0    | in receive       | SIGKILL        | 3  | node 0 rank 0: SIGKILL
rank     | 0    | in receive       | SIGSTOP        | 8  | node 0 rank 0: stopped (SIGSTOP) for 4 s (node_timeout)
rank     | 0    | in receive       | os._exit(0)    | 5  | node 0 rank 0: rank 0 ended with exit code 0, but no result was accepted
rank     | 1    | in receive       | SIGKILL        | 3  | node 1 rank 1: SIGKILL
agent    | 1    | in receive       | SIGKILL        | 3  | node 1: its agent (or python, which connects it) ended with SIGKILL
relay    | 0    | in receive       | SIGKILL        | 3  | its relay is gone
rank     | 0    | in training      | exit 1         | 3  | node 0 rank 0: exit code 1
rank     | 0    | in training      | exception      | 3  | node 0 rank 0: exit code 1
rank     | 0    | in training      | SIGKILL        | 3  | node 0 rank 0: SIGKILL
rank     | 0    | in training      | SIGSTOP        | 8  | node 0 rank 0: stopped (SIGSTOP) for 4 s (node_timeout)
rank     | 0    | in training      | os._exit(0)    | 5  | node 0 rank 0: rank 0 ended with exit code 0, but no result was accepted
rank     | 0    | in training      | closed channel | 12 | node 0 rank 0: NVFlare gave up on it: trainer heartbeat timed out after or node 0 rank 0: exit code 1
torchrun | 1    | in training      | SIGSTOP        | 12 | ok: node 1: its torchrun was stopped (SIGSTOP) for 4 s or NVFlare has ended its relay
relay    | 0    | in training      | SIGKILL        | 3  | its relay is gone
relay    | 0    | in training      | SIGSTOP        | 12 | ok:
rank     | 0    | in send          | exit 1         | 3  | node 0 rank 0: exit code 1
rank     | 0    | in send          | exception      | 3  | node 0 rank 0: exit code 1
rank     | 0    | in send          | SIGKILL        | 3  | node 0 rank 0: SIGKILL
rank     | 0    | in send          | SIGSTOP        | 8  | node 0 rank 0: stopped (SIGSTOP) for 4 s (node_timeout)
rank     | 0    | in send          | os._exit(0)    | 5  | node 0 rank 0: rank 0 ended with exit code 0, but no result was accepted
rank     | 1    | in send          | exit 1         | 3  | node 1 rank 1: exit code 1
agent    | 0    | in send          | SIGKILL        | 3  | node 0: its agent (or python, which connects it) ended with SIGKILL
agent    | 1    | in send          | SIGKILL        | 3  | node 1: its agent (or python, which connects it) ended with SIGKILL
relay    | 0    | in send          | SIGKILL        | 3  | its relay is gone
rank     | 0    | after acceptance | SIGKILL        | 3  | ok: node 0 rank 0: SIGKILL
rank     | 0    | after acceptance | exit 1         | 3  | ok: node 0 rank 0: exit code 1
rank     | 1    | after acceptance | SIGKILL        | 3  | ok: node 1 rank 1: SIGKILL
rank     | 1    | after acceptance | exception      | 3  | ok: node 1 rank 1: exit code 1
torchrun | 1    | after acceptance | SIGKILL        | 3  | ok: node 1: torchrun ended with SIGKILL
agent    | 1    | after acceptance | SIGKILL        | 3  | ok: node 1: its agent (or python, which connects it) ended with SIGKILL
relay    | 0    | after acceptance | SIGKILL        | 3  | ok: its relay is gone
CJ       | 0    | in training      | SIGKILL        | 8  | nobody
"""  # noqa: E501 - one line for each fault

CLIENT_JOB = """
what | node | when        | how     | s | blame
CJ   | 0    | before join | SIGKILL | 5 | nobody
CJ   | 0    | after join  | SIGKILL | 5 | nobody
CJ   | 0    | in training | SIGSTOP | 8 | node
"""


SSH = """
what      | node | when        | how                        | s | blame
rank      | 1    | in training | SIGKILL                    | 5 | node 1 rank 1: SIGKILL
rank      | 0    | in training | SIGKILL beside a deaf rank | 6 | node 0 rank 0: SIGKILL
rank      | 1    | in training | SIGSTOP                    | 9 | node 1 rank 1: stopped (SIGSTOP) for 4 s (node_timeout)
torchrun  | 1    | in training | SIGKILL                    | 5 | node 1: torchrun ended with SIGKILL
agent     | 1    | before join | SIGKILL                    | 5 | node 1: its agent (or ssh, which connects it) ended with exit code
agent     | 1    | in training | SIGKILL                    | 5 | node 1: its agent (or ssh, which connects it) ended with exit code
agent     | 1    | in training | SIGSTOP                    | 9 | node 1: no sign of life from it for 4 s (node_timeout)
transport | 1    | in training | SIGKILL                    | 7 | node 1: its agent (or ssh, which connects it) ended with SIGKILL
transport | 1    | in training | SIGSTOP                    | 9 | node 1: no sign of life from it for 4 s (node_timeout)
CJ        | 0    | in training | SIGKILL                    | 6 | nobody
"""  # noqa: E501 - one line for each fault

SLURM = """
what      | node | when        | how                        | s | blame
rank      | 1    | in training | SIGKILL                    | 5 | node 1 rank 1: SIGKILL
agent     | 1    | in training | SIGKILL                    | 8 | node 1: its agent (or srun, which connects it) ended with
agent     | 1    | in training | SIGSTOP                    | 9 | node 1: no sign of life from it for 4 s (node_timeout)
transport | 1    | in training | SIGKILL                    | 8 | node 1: its agent (or srun, which connects it) ended with SIGKILL
CJ        | 0    | in training | SIGKILL                    | 6 | nobody
"""  # noqa: E501 - one line for each fault

LEFT_OUT = """
what                | node | when                                               | how                                                | why
rank                | *    | before join                                        | *                                                  | ranks are started once the nodes have joined
relay, CJ           | 1    | *                                                  | *                                                  | there is one of it, on node 0
transport           | 0    | *                                                  | *                                                  | node 0 is the client job's own host, which nothing connects
rank                | 1    | in receive, in send                                | exception, SIGSTOP, os._exit(0), closed channel    | it has no part in these: to it they are training
rank                | 1    | in receive                                         | exit 1                                             | it has no part in this: to it this is training
rank                | 1    | in send                                            | SIGKILL                                            | it has no part in this: to it this is training
torchrun, transport | *    | in receive, in send                                | *                                                  | to it these are training
agent               | *    | in receive, in send                                | exit 1, exception, SIGSTOP, os._exit(0)            | to it these are training
agent               | 0    | in receive                                         | SIGKILL                                            | see in send
agent, transport    | *    | after join                                         | *                                                  | to it this is training
CJ                  | 0    | in receive, in send, after acceptance              | *                                                  | to the agents these are training
rank                | 1    | after join                                         | exception, SIGSTOP, closed channel                 | see in training
rank                | 1    | in training                                        | os._exit(0)                                        | see after join
rank                | 0    | after join, in receive, in send                    | closed channel                                     | see in training
rank                | *    | after acceptance                                   | SIGSTOP, os._exit(0), closed channel               | nobody waits for a sign of it any more
rank                | 0    | after acceptance                                   | exception                                          | to the group this is exit 1
rank                | 1    | after acceptance                                   | exit 1                                             | to the group this is an exception
torchrun            | *    | *                                                  | exception, closed channel                          | an exception is exit 1 to all others; torchrun has no channel
torchrun            | *    | in training                                        | exit 1                                             | see after join
torchrun            | 1    | after join                                         | SIGKILL, SIGSTOP                                   | see in training
torchrun            | 0    | before join                                        | SIGKILL, os._exit(0)                               | see node 1
torchrun            | 0    | after join                                         | exit 1, SIGSTOP, os._exit(0)                       | see node 1
torchrun            | 0    | in training                                        | SIGSTOP, os._exit(0)                               | see node 1
torchrun            | *    | after acceptance                                   | exit 1, SIGSTOP, os._exit(0)                       | see SIGKILL: nobody waits for it any more
torchrun            | 0    | after acceptance                                   | SIGKILL                                            | see node 1
agent               | *    | *                                                  | closed channel                                     | the other end of its channel is the transport's, see there
agent               | *    | before join                                        | exception, os._exit(0)                             | see at start
agent               | 0    | before join                                        | exit 1, SIGSTOP                                    | see node 1
agent               | 1    | before join                                        | SIGKILL                                            | see node 0
agent               | 0    | in training                                        | exit 1, exception, SIGSTOP, os._exit(0)            | see node 1
agent               | *    | after acceptance                                   | exit 1, exception, SIGSTOP, os._exit(0)            | to the group this is SIGKILL
agent               | 0    | after acceptance                                   | SIGKILL                                            | it takes rank 0's output with it, and the result is NVFlare's by then
relay               | 0    | *                                                  | exit 1, exception, os._exit(0), closed channel     | the end of its connection is all that the group sees of it
relay               | 0    | before join, after join, in receive, in send, after acceptance | SIGSTOP                                | see in training: it has nothing to do until the end
relay               | 0    | after join                                         | SIGKILL                                            | see exit 1
transport           | 1    | before join, in training                           | exit 1, exception, os._exit(0)                     | it is no Python; its end is seen, whatever its code
transport           | 1    | after acceptance                                   | *                                                  | to the group this is an agent that dies
CJ                  | 0    | *                                                  | exit 1, exception, os._exit(0), closed channel     | NVFlare ends the run in order then, or it is SIGKILL to the agents
CJ                  | 0    | before join, after join                            | SIGSTOP                                            | see in training
"""  # noqa: E501 - one line for each reason


def left_out() -> list[tuple[str, list[tuple[str, int, str, str]]]]:
    """Each reason, with the combinations that are left out for it."""
    _title, *lines = LEFT_OUT.strip().splitlines()
    reasons = []
    for line in lines:
        what, where, when, how, why = (cell.strip() for cell in line.split("|"))
        cells = (_each(what, WHAT), _each(where, ("0", "1")), _each(when, WHEN), _each(how, HOW))
        reasons.append((why, [(a, int(b), c, d) for a, b, c, d in itertools.product(*cells)]))
    return reasons


def _each(cell: str, everything: Sequence[str]) -> Sequence[str]:
    return everything if cell == "*" else cell.split(", ")


def parse(text: str) -> list[Row]:
    """Read the lines of a table."""
    _title, *lines = text.strip().splitlines()
    rows = []
    for line in lines:
        what, where, when, how, bound, blame = (cell.strip() for cell in line.split("|"))
        rows.append(Row(what, int(where), when, how, blame, float(bound)))
    return rows
