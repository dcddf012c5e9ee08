"""Protocol between a node and its children, with proof that they belong to the same job.

Both sides prove that they know the job's secret (HMAC of two nonces). Each list of pieces has an HMAC with the
session's key; a piece is compared with its digest in the list. Nothing is encrypted.
"""

# ruff: noqa: UP006, UP035, UP045 - Python 3.6

import hmac
import json
import os
import socket
import struct
import threading
import time
from typing import IO, Any, Dict, List, Optional, Sequence, Tuple

from .disk import Lost, Piece

PIECE = struct.Struct(">I32s")
ASK = struct.Struct(">cI")  # the kind of a question, and a number
_SIZE = struct.Struct(">I")
_BATCH = 64  # pieces in a list
_KEY = 64  # bytes of a key
SILENT_S = 15  # a parent that says nothing for so long is lost


class Copy:
    """A node's copy of the image: `file` has its first `len(pieces)` pieces, with `whole` all of them.

    `key` is "" as long as it is unknown. `reports` are the children's reports by node number, and `asked` is the time
    of a child's last request.
    """

    def __init__(self) -> None:
        self.pieces: List[Piece] = []
        self.offsets, self.key, self.whole, self.asked = [0], "", False, time.time()
        self.file: Optional[IO[bytes]] = None
        self.reports: Dict[int, Dict[str, Any]] = {}
        self.changed = threading.Condition()

    def say(self, pieces: Sequence[Piece] = (), key: str = "", whole: bool = False) -> None:
        """Add pieces, the key or the end to the copy, and wake the threads that serve the children."""
        with self.changed:
            for piece in pieces:
                self.pieces.append(piece)
                self.offsets.append(self.offsets[-1] + piece[0])
            self.key, self.whole = key or self.key, whole
            self.changed.notify_all()


def take(connection: socket.socket, size: int) -> bytes:
    """Receive `size` bytes. Raises Lost, OSError."""
    data = bytearray()
    while len(data) < size:
        more = connection.recv(min(size - len(data), 1 << 20))
        if not more:
            raise Lost("the connection was closed")
        data += more
    return bytes(data)


def code(key: bytes, *parts: bytes) -> bytes:
    """Return the HMAC-SHA256 of the parts."""
    return hmac.new(key, b"".join(parts), "sha256").digest()


def ask(connection: socket.socket, secret: bytes) -> bytes:
    """Prove to a parent that this node knows the secret; return the session's key. Raises Lost, OSError."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    theirs, mine = take(connection, 32), os.urandom(32)
    connection.sendall(mine + code(secret, b"child", theirs, mine))
    session = take(connection, 32)
    if not hmac.compare_digest(session, code(secret, b"parent", theirs, mine)):
        raise Lost("this is another job's node")
    return session


def ask_pieces(connection: socket.socket, session: bytes, first: int) -> Tuple[str, bool, List[Piece]]:
    """Return the key, "" if the parent does not know it, whether `first` is the end, and pieces from `first` on.

    Raises Lost, OSError.
    """
    connection.sendall(ASK.pack(b"L", first))
    body = take(connection, _SIZE.unpack(take(connection, _SIZE.size))[0])
    if not hmac.compare_digest(take(connection, 32), code(session, body)):
        raise Lost("a list of pieces was changed on its way")
    key, end, listed = body[:_KEY].decode().strip(), body[_KEY : _KEY + 1] == b"E", body[_KEY + 1 :]
    return key, end, [(size, digest) for size, digest in PIECE.iter_unpack(listed)]


def answer(copy: Copy, secret: bytes, connection: socket.socket) -> None:
    """Answer a child's requests up to its report: L for a list of pieces from a number, G for a piece, D with a report.

    Raises Lost, OSError, ValueError, IndexError when the child is lost or is no child.
    """
    for limit in (socket.SO_RCVTIMEO, socket.SO_SNDTIMEO):  # a timeout of Python's sockets excludes sendfile
        connection.setsockopt(socket.SOL_SOCKET, limit, struct.pack("ll", 4 * SILENT_S, 0))
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    mine = os.urandom(32)
    connection.sendall(mine)
    theirs, proof = take(connection, 32), take(connection, 32)
    if not hmac.compare_digest(proof, code(secret, b"child", mine, theirs)):
        return
    session = code(secret, b"parent", mine, theirs)
    connection.sendall(session)
    sent_key = False  # a child that has the image stops when it gets the key
    while True:
        kind, number = ASK.unpack(take(connection, ASK.size))
        copy.asked = time.time()
        if kind == b"L":
            with copy.changed:
                if number >= len(copy.pieces) and not copy.whole and (sent_key or not copy.key):
                    copy.changed.wait(SILENT_S / 5)
                listed, end = copy.pieces[number : number + _BATCH], copy.whole and number == len(copy.pieces)
                sent_key = copy.key != ""
                head = copy.key.encode().ljust(_KEY) + (b"E" if end else b"-")
            body = head + b"".join(PIECE.pack(*piece) for piece in listed)
            connection.sendall(_SIZE.pack(len(body)) + body + code(session, body))
        elif kind == b"G":
            assert copy.file is not None
            offset, left = copy.offsets[number], copy.pieces[number][0]
            while left:
                sent = os.sendfile(connection.fileno(), copy.file.fileno(), offset, left)
                offset, left = offset + sent, left - sent
        else:
            message = json.loads(take(connection, number).decode())
            with copy.changed:
                copy.reports[message["number"]] = message
                copy.changed.notify_all()
            return
