"""A command in a pod, with this terminal as its own: what `kubectl exec -it` does, without kubectl."""

from __future__ import annotations

import json
import os
import select
import shutil
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import IO, Any, Final

from dropforge.errors import DropforgeError

_CONTAINER: Final = "pytorch"
# The first byte of each message names its channel.
_STDIN, _STDOUT, _STDERR, _END, _RESIZE, _CLOSE = 0, 1, 2, 3, 4, 255
_CLOSES: Final = "v5.channel.k8s.io"  # the first protocol that can tell the end of the input
_LOOK: Final = 0.25  # seconds between two looks at the size of the terminal
_CHUNK: Final = 4096  # bytes of input: a socket that takes any takes as many


def run_in_pod(api: Any, pod: str, namespace: str, command: Sequence[str]) -> int:
    """Run it to its end; its exit code. :raises DropforgeError: if the cluster does not let us, or the way breaks."""
    from kubernetes import client
    from kubernetes.client.exceptions import ApiException
    from kubernetes.stream import stream
    from websocket import WebSocketException

    thing, terminal = f"pod {namespace}/{pod}", _is_terminal(sys.stdin) and _is_terminal(sys.stdout)
    try:
        channel = stream(
            client.CoreV1Api(api).connect_get_namespaced_pod_exec,
            pod,
            namespace,
            container=_CONTAINER,
            command=list(command),
            stdin=True,
            stdout=True,
            stderr=not terminal,  # a terminal has one stream
            tty=terminal,
            binary=True,
            _preload_content=False,
        )
    except (ApiException, AttributeError) as error:  # the client stumbles over answers that refuse
        raise _not_let_in(thing, error) from error
    try:
        with _raw(terminal):
            told = _copy(channel.sock, terminal, closes=channel.subprotocol == _CLOSES)
    except (WebSocketException, ConnectionError) as error:
        if isinstance(error, BrokenPipeError):  # nobody reads what we write
            raise
        told = b""
    return _exit_code(told, thing)


def _not_let_in(thing: str, error: BaseException) -> DropforgeError:
    """From what the cluster answers instead of a connection."""
    root: BaseException = error
    while root.__context__ is not None:
        root = root.__context__
    status, body = getattr(root, "status_code", 0), getattr(root, "resp_body", None)
    try:
        said = str(json.loads(body or b"")["message"])
    except (ValueError, KeyError, TypeError):
        said = str(root)
    cause = f"the cluster does not let you in ({status or 'no answer'}: {' '.join(said.split())[:300]})"
    mends = {
        403: "You need the rights `get` and `create` on pods/exec there",
        404: "It has just gone: see with `dropforge top` what runs now",
    }
    return DropforgeError(
        thing, cause, mends.get(status, "See with `dropforge top` whether it runs, and on which node")
    )


def _exit_code(told: str | bytes, thing: str) -> int:
    """From what the cluster tells at the end. :raises DropforgeError: if the command was not run to its end."""
    try:
        status = json.loads(told)
    except ValueError:
        status = None
    if not isinstance(status, dict):
        raise DropforgeError(thing, "the connection broke", "See with `dropforge top` whether it runs")
    if status.get("status") == "Success":
        return 0
    for cause in (status.get("details") or {}).get("causes") or []:
        if cause.get("reason") == "ExitCode" and str(cause.get("message")).isdecimal():
            return int(cause["message"])
    raise DropforgeError(thing, str(status.get("message") or "the command was not run"), "Name another command")


def _copy(channel: Any, terminal: bool, *, closes: bool) -> bytes:
    """Between the pod and this process's own streams, until the command ends; what the cluster tells of its end.

    :param channel: a `websocket.WebSocket`. :param closes: whether it can be told that the input has ended.
    """
    from websocket import ABNF

    def send(number: int, data: bytes) -> None:
        channel.send(bytes([number]) + data, opcode=ABNF.OPCODE_BINARY)

    told, size, outputs = b"", (0, 0), {_STDOUT: sys.stdout.buffer, _STDERR: sys.stderr.buffer}
    keys = [] if sys.stdin is None else [sys.stdin.fileno()]
    while True:
        now = shutil.get_terminal_size()
        if terminal and (now.columns, now.lines) != size:
            size = (now.columns, now.lines)
            send(_RESIZE, json.dumps({"Width": size[0], "Height": size[1]}).encode())
        ready = _ready(channel.sock, keys)
        if keys and keys[0] in ready:
            if data := os.read(keys[0], _CHUNK):
                send(_STDIN, data)
            else:
                keys = []
                if closes:
                    send(_CLOSE, bytes([_STDIN]))
        if channel.sock in ready:
            kind, frame = channel.recv_data_frame(True)
            if kind == ABNF.OPCODE_CLOSE:
                return told
            if kind in (ABNF.OPCODE_BINARY, ABNF.OPCODE_TEXT) and frame.data:
                number, data = frame.data[0], frame.data[1:]
                told += data if number == _END else b""
                if number in outputs:
                    _write(outputs[number], data)


def _ready(sock: Any, keys: Sequence[int]) -> Sequence[Any]:
    """Which of them can be read now, or within a moment; keys only if the pod takes them."""
    if getattr(sock, "pending", int)():
        return [sock]  # decrypted already, of which `select` knows nothing
    ready = select.select([sock, *keys], [], [], _LOOK)[0]
    if keys and keys[0] in ready and not select.select([], [sock], [], 0)[1]:
        # While we waited to send, nobody would read, and the command might wait for that.
        return select.select([sock], [sock], [], _LOOK)[0]
    return ready


def _write(target: IO[bytes], data: bytes) -> None:
    target.write(data)
    target.flush()


def _is_terminal(stream: Any) -> bool:
    return stream is not None and stream.isatty()


@contextmanager
def _raw(terminal: bool) -> Iterator[None]:
    """Keys go to the pod as they are pressed, Ctrl-C among them."""
    if not terminal:
        yield
        return
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    try:
        tty.setraw(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
