"""Programs in processes of their own that begin at once: forked from one that has imported what all of them need.

They end as any program does, by running to their end: what they say then, and with which status, is to be seen.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

_LONGEST = 2**16
_PARENT = f"""
import json, os, signal, socket, sys, threading, time
sys.path.insert(0, {str(Path(__file__).parent)!r})
import paceline.server.run, scripted

told = socket.socket(fileno=int(sys.argv[1]))
while asked := told.recv({_LONGEST}):
    program, *outputs = json.loads(asked)
    child = os.fork()
    if child == 0:
        told.close()
        for number, path in enumerate(outputs, 1):
            os.dup2(os.open(path, os.O_WRONLY), number)
        exec(program)
        break
    told.send(b"%d" % child)
    told.send(b"%d" % os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


class Parent:
    """Of programs that are run one at a time; what they write is kept in the directory."""

    def __init__(self, directory: Path) -> None:
        self.outputs = [directory / name for name in ("stdout", "stderr")]
        self.told, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-c", _PARENT, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    def close(self) -> None:
        self.told.close()
        self._process.wait(timeout=20)


class Program:
    """As much of ``subprocess.Popen`` as is needed."""

    def __init__(self, parent: Parent, program: str) -> None:
        self._parent, self.returncode = parent, 0
        for path in parent.outputs:
            path.write_text("")
        parent.told.settimeout(60)
        parent.told.send(json.dumps([program, *map(str, parent.outputs)]).encode())
        self.pid, self._running = int(parent.told.recv(_LONGEST)), True

    def send_signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        if self._running:
            with contextlib.suppress(ProcessLookupError):
                self.send_signal(signal.SIGKILL)
            self.communicate(timeout=10)

    def communicate(self, timeout: float) -> tuple[str, str]:
        """Wait for its end; what it has written."""
        self._parent.told.settimeout(timeout)
        self.returncode, self._running = int(self._parent.told.recv(_LONGEST)), False
        out, err = (path.read_text() for path in self._parent.outputs)
        return out, err
