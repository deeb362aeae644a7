"""Becomes another program that dies when this one's parent does.

    python -I -S launcher.py PARENT_PID PROGRAM ARGUMENT…

A supervisor that is killed can't stop its children; the kernel can (PR_SET_PDEATHSIG survives exec). Standard library
only, and run by path without `site`, so that it costs a few milliseconds. On systems without prctl it only execs.
"""

import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main() -> None:
    """Ask for the signal, then exec; exit if the parent died in between."""
    parent_pid, program, *arguments = sys.argv[1:]
    if sys.platform == "linux":
        import ctypes

        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
        if os.getppid() != int(parent_pid):
            sys.exit("the supervisor is gone")
    os.execv(program, [program, *arguments])


if __name__ == "__main__":
    main()
