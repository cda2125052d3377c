"""The job's ``custom`` folder on a node that does not share it: packed in the client job, unpacked by an agent.

The agent's part uses the standard library only.
"""

from __future__ import annotations

import base64
import io
import os
from collections.abc import Iterator

FOLDER = "custom"
"""Name of the folder in a job's app that holds its code."""
_PIECE = 1 << 20
"""Bytes of the archive in one message."""


class StagingError(ValueError):
    """The folder cannot be sent, or what arrived is not one; one clear sentence."""


class Archive:
    """A folder as it is now; one that is not there is empty.

    Attributes:
        data: a tar archive of it.
        digest: tells one content from another.
    """

    def __init__(self, app_dir: str, name: str = FOLDER) -> None:
        """Pack the folder of this name in ``app_dir``; links are followed.

        Raises:
            StagingError: it cannot be read.
        """
        # Neither is needed where an agent starts.
        import hashlib
        import tarfile
        from pathlib import Path

        packed = io.BytesIO()

        def wanted(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
            # Ranks on this host leave their bytecode beside the code, and with it a new time on the directory:
            # neither makes it another folder.
            if entry.isdir():
                entry.mtime = 0
                return None if os.path.basename(entry.name) == "__pycache__" else entry  # noqa: PTH119 - no file
            return entry if entry.isfile() else None

        try:
            folder = Path(app_dir, name)
            with tarfile.open(fileobj=packed, mode="w", dereference=True) as archive:
                # A job without code of its own has none; its script, the site's, needs a directory to work in.
                if folder.exists():
                    archive.add(folder, name, filter=wanted)
        except OSError as e:
            raise StagingError(f"cannot pack the folder {name} of {app_dir} for other nodes: {e}") from None
        self.data = packed.getvalue()
        self.digest = hashlib.sha256(self.data).hexdigest()

    def pieces(self) -> Iterator[str]:
        """Return the archive in pieces for the wire, the last one empty."""
        for first in range(0, len(self.data), _PIECE):
            yield base64.b64encode(self.data[first : first + _PIECE]).decode()
        yield ""


class Incoming:
    """The copy on a node while it arrives."""

    def __init__(self, directory: str) -> None:
        """Begin a copy below ``directory``, which its owner removes."""
        self._directory = f"{directory}/app"
        self._parts: list[bytes] = []

    def take(self, data: str) -> str | None:
        """Take a piece; after the last one return the absolute path of the copy.

        Raises:
            StagingError: a piece or the whole is not valid.
            OSError: the directory cannot be written.
        """
        if data:
            try:
                self._parts.append(base64.b64decode(data, validate=True))
            except ValueError as e:
                raise StagingError(f"a piece of the job's folder is not base64: {e}") from None
            return None
        import tarfile

        os.mkdir(self._directory, 0o700)  # noqa: PTH102 - pathlib takes long to import
        try:
            with tarfile.open(fileobj=io.BytesIO(b"".join(self._parts)), mode="r:") as archive:
                if hasattr(tarfile, "data_filter"):
                    archive.extractall(self._directory, filter="data")
                else:
                    # Before Python 3.10.12 and 3.11.4; the archive is our own client job's.
                    archive.extractall(self._directory)  # noqa: S202 - as said
        except tarfile.TarError as e:
            raise StagingError(f"the job's folder did not arrive whole: {e}") from None
        self._parts = []
        return self._directory
