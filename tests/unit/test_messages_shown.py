"""The messages that the README explains are those that this package prints."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ENOUGH = 10
"""Letters of a message that are its own, beside those of values."""

# NVFlare prints these.
_THEIRS = ("NVFlare's", "a consequence")


def rows() -> list[str]:
    """Pieces of our messages, between what each leaves out."""
    table = (ROOT / "README.md").read_text().partition("[start:troubles]")[2].partition("[end:troubles]")[0]
    pieces = []
    for line in table.splitlines()[3:]:
        if not line.startswith("| `"):
            continue
        message, _, meaning = line.strip("| ").partition(" | ")
        if meaning.startswith(_THEIRS):
            continue
        for text in re.findall("`([^`]+)`", message):
            pieces += [piece for part in text.split("...") if len(piece := part.strip(" '")) >= ENOUGH]
    return pieces


def printed() -> list[list[str]]:
    """What the package's strings say: the texts of each, between which are its values."""
    said = []
    for path in sorted((ROOT / "nvflare_torchrun_plugin").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.JoinedStr):
                texts = [""]
                for part in node.values:
                    if isinstance(part, ast.Constant):
                        texts[-1] += str(part.value)
                    else:
                        texts.append("")
                said.append(texts)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                said.append([node.value])
    return said


PRINTED = printed()


def is_part_of(piece: str, texts: list[str]) -> bool:
    """Whether some values make a string of these texts in which the piece stands."""
    if any(piece in text for text in texts):
        return True
    for first in range(len(texts) - 1):
        for last in range(first + 1, len(texts)):
            # It begins with the end of one text and ends with the beginning of another, as much as it can.
            head = next(text for text in _ends(texts[first]) if piece.startswith(text))
            tail = next(text for text in _beginnings(texts[last]) if piece.endswith(text))
            if (texts[first] and not head) or (texts[last] and not tail):
                continue
            between = texts[first + 1 : last]
            literal = ".+".join(map(re.escape, [head, *between, tail]))
            if sum(map(len, [head, *between, tail])) >= ENOUGH and re.fullmatch(literal, piece):
                return True
    return False


def _ends(text: str) -> list[str]:
    return [text[begin:] for begin in range(len(text) + 1)]


def _beginnings(text: str) -> list[str]:
    return [text[:end] for end in range(len(text), -1, -1)]


@pytest.mark.parametrize("piece", rows())
def test_it_is_printed_so(piece: str) -> None:
    assert any(is_part_of(piece, texts) for texts in PRINTED)
