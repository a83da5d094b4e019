"""A TCP proxy that loses the rest: after a given byte of request or reply both sides are cut off."""

import select
import socket
import struct
import threading
from typing import Final, Self
from urllib.parse import urlsplit

READ_BYTES: Final = 65536
WAIT_SECONDS: Final = 30.0
RESET: Final = struct.pack("ii", 1, 0)


class LossyProxy:
    """Passes one connection after the other on to ``upstream``, as far as the two limits let it.

    ``request_bytes`` of the request reach the server, ``reply_bytes`` of the answer the client; None is all.
    The limit of the reply takes effect when the server has begun to answer, so with 0 the request has been
    carried out and the client hears nothing. The client sees an end of the stream, the server a reset.
    ``cuts`` counts what was really cut, ``replied`` holds what the server said in the last connection.
    """

    def __init__(self, upstream: str) -> None:
        address = urlsplit(upstream)
        self._upstream = (address.hostname or "", address.port or 0)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._thread = threading.Thread(target=self._run, name="lossy-proxy", daemon=True)
        self.port: int = self._listener.getsockname()[1]
        self.request_bytes: int | None = None
        self.reply_bytes: int | None = None
        self.cuts = 0
        self.replied = b""

    def _run(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # Closed: the end of the test.
            with client, socket.create_connection(self._upstream, WAIT_SECONDS) as server:
                if self._pass_on(client, server):
                    server.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, RESET)
                    self.cuts += 1

    def _pass_on(self, client: socket.socket, server: socket.socket) -> bool:
        """Pass bytes on until one side ends or a limit is reached; True for the limit."""
        asked, self.replied = 0, b""
        while True:
            ready, _, _ = select.select((client, server), (), (), WAIT_SECONDS)
            if not ready:
                return False
            if server in ready:
                data, had = server.recv(READ_BYTES), len(self.replied)
                self.replied += data
                left = len(data) if self.reply_bytes is None else max(0, self.reply_bytes - had)
                client.sendall(data[:left])
                if not data or left < len(data) or self.reply_bytes == had + left:
                    return bool(data)
            if client in ready:
                data = client.recv(READ_BYTES)
                left = len(data) if self.request_bytes is None else max(0, self.request_bytes - asked)
                server.sendall(data[:left])
                asked += len(data)
                if not data or left < len(data):
                    return bool(data)

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._thread.join(WAIT_SECONDS)
