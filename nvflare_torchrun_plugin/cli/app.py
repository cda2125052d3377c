"""What the console command runs: a verb, and an end without a traceback, whatever its terminal or pipe does.

The verbs are imported late: Ctrl-C while they load is Ctrl-C as well.
"""

from __future__ import annotations

import errno
import io
import os
import sys

__all__ = ["main"]

_INTERRUPTED = 130
"""As shells say it of a command that SIGINT has ended."""
# Of writing to a pipe, a terminal or a disk; other errors of the system are told where they happen.
_NOT_WRITTEN = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO, errno.EBADF)


def main() -> None:
    """Run the verb that the command line names, and end the process with its exit code."""
    try:
        _fill_closed_descriptors()
        _write_whatever_can_be_encoded()
        code = _run()
    except KeyboardInterrupt:
        code = _INTERRUPTED
    sys.exit(code)


def _run() -> int:
    from .output import RefusedError, complain, give_output_up
    from .verbs import app

    code, lost = 0, None
    try:
        app()
    except RefusedError as refused:
        complain(str(refused))
        code = 2
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except OSError as error:
        if error.errno not in _NOT_WRITTEN:
            raise
        lost = error
    try:
        for stream in (sys.stdout, sys.__stdout__):
            if stream is not None:
                stream.flush()
    except OSError as error:
        lost = error
    if lost is not None:
        give_output_up(lost)
        code = code or 1
    return code


def _fill_closed_descriptors() -> None:
    """Open what a caller has closed of stdin, stdout and stderr: files and sockets must not take their numbers."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)
    # Python has no stream where it found one closed, and the number may be some other file's by now.
    sys.stdin = sys.stdin or os.fdopen(os.open(os.devnull, os.O_RDONLY))
    sys.stdout = sys.stdout or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")
    sys.stderr = sys.stderr or os.fdopen(os.open(os.devnull, os.O_WRONLY), "w")


def _write_whatever_can_be_encoded() -> None:
    """Let signs that the locale does not have be written as escapes."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and stream.errors == "strict":
            stream.reconfigure(errors="backslashreplace")
