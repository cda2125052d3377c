"""The files of a site's startup kit that concern us, read and written."""

from __future__ import annotations

import difflib
import json
import os
import shlex
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .output import RefusedError, printable

__all__ = [
    "ALLOW_LIST",
    "CLASSES",
    "allows",
    "command",
    "is_allowed",
    "local_folder",
    "put",
    "resources_file",
    "resources_of",
    "show_difference",
]

CLASSES = "nvflare_torchrun_plugin."
"""What a job without code of its own needs in the list."""
ALLOW_LIST = "class_allow_list"
# What the two kinds of kit are started with (nvflare.lighter.constants.ProvFileName).
_SERVERS, _SITES = "fed_server.json", "fed_client.json"


def command(verb: str, kit: Path, *options: str) -> str:
    """Return the command line of a verb of `site`, for a person to copy."""
    return shlex.join(["nvflare-torchrun", "site", verb, str(kit), *options])


def local_folder(kit: Path) -> Path:
    """Return the folder of the site's own files.

    Raises:
        RefusedError: this is no site's kit, or not for this user to look into.
    """
    local, startup = kit / "local", kit / "startup"
    try:
        whole = local.is_dir() and startup.is_dir()
        servers = (startup / _SERVERS).exists() and not (startup / _SITES).exists()
        # Who may not look into local/ cannot even know what is not there.
        (local / "resources.json").exists()
    except OSError as error:
        raise RefusedError(
            f"{kit} cannot be looked into: {error.strerror}; ask its owner, or be that user"
        ) from None
    if not whole:
        raise RefusedError(f"{kit} is no startup kit: it has no local/ and startup/; give the site's folder")
    if servers:
        raise RefusedError(
            f"{kit} is the server's kit (startup/{_SERVERS}); give a site's folder: nodes are sites'"
        )
    return local


def resources_file(local: Path) -> Path:
    """Return the one that NVFlare reads.

    Raises:
        RefusedError: there is none.
    """
    for name in ("resources.json", "resources.json.default"):
        if (local / name).is_file():
            return local / name
    raise RefusedError(f"{local} has no resources.json and no resources.json.default; make the kit again")


def resources_of(path: Path) -> tuple[str, dict[str, Any]]:
    """Return the file's text, and what it says.

    Raises:
        RefusedError: it cannot be read, or is not whole.
    """
    try:
        text = path.read_text(encoding="utf-8")
        resources = json.loads(text)
    except (OSError, ValueError) as error:
        raise RefusedError(f"{path} cannot be read: {error}; correct it") from None
    classes = resources.get(ALLOW_LIST) if isinstance(resources, dict) else None
    if not isinstance(classes, list):
        raise RefusedError(
            f"{path} has no list {ALLOW_LIST}: it is no whole copy of resources.json.default; correct it"
        )
    return text, resources


def is_allowed(resources: dict[str, Any]) -> bool:
    """Return whether our classes are."""
    return any(prefix in resources[ALLOW_LIST] for prefix in ("*", CLASSES, CLASSES.rstrip(".")))


def allows(local: Path) -> bool:
    """Return whether the site allows our classes.

    Raises:
        RefusedError: its file is not there, or not whole.
    """
    return is_allowed(resources_of(resources_file(local))[1])


def put(target: Path, text: str, check: Callable[[Path], object], source: Path | None = None) -> None:
    """Write the file in one piece, once it has been read back without a complaint; a link stays one.

    Who may read it stays as it was, or is as with the source of a new one. Written by root it belongs to whom it
    belonged to, a new one to the owner of its folder: the site's own user must be able to read it. Root
    follows no link of a user to what is not that user's.

    Args:
        target: the file.
        text: what it is to hold.
        check: reads a draft of it.
        source: the file that a new one is made of.

    Raises:
        RefusedError: it cannot be written, or ``check`` has raised a ValueError.
    """
    place = Path(os.path.realpath(target))
    draft = place.with_name(f".{place.name}.{os.getpid()}")
    made = False
    try:
        owner = (place if place.exists() else place.parent).stat()
        if target.is_symlink() and os.geteuid() == 0 and (user := target.lstat().st_uid) not in (0, owner.st_uid):
            raise RefusedError(
                f"{target} is a link of user {user} to {place}, which is not that user's: write that file itself"
            )
        like = place if place.exists() else source
        # Never through a link that somebody has laid there: this may be root in a folder of another's. And until
        # it is known who may read it, nobody else does.
        flags, mode = os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if like is None else 0o600
        with open(os.open(draft, flags, mode), "w", encoding="utf-8") as file:
            made = True
            file.write(text)
            if os.geteuid() == 0:
                os.fchown(file.fileno(), owner.st_uid, owner.st_gid)
            if like is not None:
                os.fchmod(file.fileno(), stat.S_IMODE(like.stat().st_mode))
        check(draft)
        draft.replace(place)
        made = False
    except OSError as error:
        raise RefusedError(f"{target} cannot be written: {error.strerror}") from None
    except ValueError as error:
        raise RefusedError(str(error).replace(str(draft), str(target))) from None
    finally:
        if made:
            draft.unlink(missing_ok=True)


def show_difference(old: str, new: str, target: Path, source: Path | None = None) -> None:
    """Print what is taken away and what is added; signs that could rule a terminal are written out."""
    lines = difflib.unified_diff(
        old.splitlines(), new.splitlines(), str(source or target), str(target), n=2, lineterm=""
    )
    sys.stdout.writelines(printable(line) + "\n" for line in lines)
