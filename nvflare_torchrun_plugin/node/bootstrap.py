"""The Client API bootstrap of NVFlare: the one private thing of it that this package must know.

NVFlare's backend writes a JSON file for the trainer that it starts and names it in a variable. Ranks on
other nodes need the file's shape (``flare.init`` reads it on every rank) but neither its secret nor the CJ's
process id, which means nothing there. The names are from ``nvflare.client.cell.bootstrap`` (2.9); a test
compares them.
"""

from __future__ import annotations

import json

FILE_VARIABLE = "NVFLARE_CLIENT_API_BOOTSTRAP"
_LAUNCH_TOKEN = "launch_token"  # noqa: S105 - a key's name, not a token
_CJ_PID = "cj_pid"


def without_secret(text: str) -> str:
    """Return the bootstrap for nodes other than the CJ's: placeholder for the token, no process id.

    Raises:
        ValueError: the text is not a JSON object.
    """
    data = json.loads(text)
    if not isinstance(data, dict):
        raise ValueError(f"the Client API bootstrap must be a JSON object, got {type(data).__name__}")
    if _LAUNCH_TOKEN in data:
        data[_LAUNCH_TOKEN] = "kept-on-node-0"
    data.pop(_CJ_PID, None)
    return json.dumps(data)
