"""A node of the tree, which receives the image and passes it on to its children."""

# ruff: noqa: SIM115, B905, UP006, UP032, UP035, UP041 - Python 3.6

import errno
import hashlib
import json
import os
import socket
import struct
import threading
import time
from contextlib import closing, suppress
from typing import Any, Dict, Iterator, Tuple

from .disk import Folder, Lost, Piece, piece_of, seal, split
from .disk import locked as lock
from .tree import opened
from .wire import ASK, PIECE, SILENT_S, Copy, answer, ask, ask_pieces, take

STUCK_S = 300  # a parent that has had nothing new for so long
ORPHANS_S = 2 * SILENT_S  # the time in which children of a lost node find this one
_SUMS = ("nodes", "had", "file", "network", "disk", "shared")


class Node:
    """Node `number` of `nodes`. Each node writes its address to the file `files`.NUMBER.

    `counts` is the report about this node and the nodes below it: their number, how many of them had the image, the
    bytes from the shared file, from other nodes and from their own disks, and [name, reason] of each node that uses
    the shared file.
    """

    def __init__(self, number: int, nodes: int, files: str, folder: Folder, secret: bytes) -> None:
        self.number, self.nodes, self.files, self.folder, self.secret = number, nodes, files, folder, secret
        self.copy = Copy()
        self.counts: Dict[str, Any] = {"number": number, "shared": [], **dict.fromkeys(_SUMS[:-1], 0), "nodes": 1}

    def say(self, line: str) -> None:
        """Write this node's line for the nodes below it. Raises OSError."""
        draft = "{}.{}.new".format(self.files, self.number)
        with open(draft, "w") as file:
            file.write(line + "\n")
        os.rename(draft, "{}.{}".format(self.files, self.number))

    def listen(self, address: str, size: int) -> None:
        """Serve the nodes below, and write the address and port for them. Raises OSError."""
        server = socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET)
        server.bind((address, 0))
        server.listen(64)

        def serve(connection: socket.socket) -> None:
            lost = (OSError, ValueError, IndexError, KeyError, TypeError, struct.error, Lost)
            with suppress(*lost), closing(connection):  # the child may come again
                answer(self.copy, self.secret, connection)

        def accept() -> None:
            while True:
                threading.Thread(target=serve, args=(server.accept()[0],), daemon=True).start()

        threading.Thread(target=accept, daemon=True).start()
        self.say("{} {} {}".format(address, server.getsockname()[1], size))

    def ancestors(self) -> Iterator[Tuple[socket.socket, bytes, int]]:
        """Yield (connection, session's key, size of the image) of each ancestor that answers, up to node 0."""
        number = self.number
        while number:
            number = (number - 1) // 2
            line, end, pause = "", time.time() + 4 * SILENT_S, 0.05
            while not line and time.time() < end:
                try:
                    with open("{}.{}".format(self.files, number)) as file:
                        line = file.read()
                except OSError:
                    os.utime(os.path.dirname(self.files))  # else an NFS client remembers that there is no such file
                    pause = min(1.5 * pause, 1)
                    time.sleep(pause)
            try:
                address, port, size = line.split()
                connection = socket.create_connection((address, int(port)), SILENT_S)
            except (OSError, ValueError):
                continue
            with closing(connection):
                try:
                    session = ask(connection, self.secret)
                except (OSError, Lost):
                    continue
                yield connection, session, int(size)

    def read(self, source: str, manifest: str, address: str) -> None:
        """Read the shared file or environment on node 0, unless its disk has the image.

        `manifest` is the SHA-256 of an environment's manifest, "" for a file. Raises OSError, Lost.
        """
        sealed, measure, read = opened(source, manifest)
        about = "{}\n{}".format(source, sealed).encode("utf-8", "surrogateescape")
        key_name = hashlib.sha256(about).hexdigest() + ".source"
        try:
            with open(self.folder.at(key_name)) as key:
                had = self.use(key.read())
        except OSError:
            had = False
        size = self.copy.offsets[-1] if had else measure()
        if not had:
            self.begin(size)
        if self.nodes > 1:
            self.listen(address, size)
        if not had:
            for data in split(read):
                self.add(data, piece_of(data), "file")
            self.folder.write(key_name, self.end())

    def receive(self) -> None:
        """Receive the image from the nearest ancestor that answers. Raises OSError, Lost."""
        why, listens = "no node towards node 0 answers", False
        for connection, session, size in self.ancestors():
            if not listens:
                self.listen(connection.getsockname()[0], size)
                listens = True
            try:
                return self.follow(connection, session, size)
            except (Lost, socket.timeout, ConnectionError, struct.error) as error:
                why = str(error)
        raise Lost(why)

    def follow(self, connection: socket.socket, session: bytes, size: int) -> None:
        """Receive the missing pieces of an image of `size` bytes from a parent. Raises Lost, OSError."""
        news = time.time()
        while time.time() - news < STUCK_S:
            first = len(self.copy.pieces)
            key, end, listed = ask_pieces(connection, session, first)
            if key and not first and self.use(key):
                return
            if self.copy.file is None:  # not before: an image that is here needs no room, and must not make any
                self.begin(size)
            self.copy.say(key=key)
            if end:
                if self.end() != key:
                    raise Lost("these are not the pieces of node 0")
                return
            here = [self.folder.piece(piece) for piece in listed]
            asked = [first + number for number, data in enumerate(here) if data is None]
            connection.sendall(b"".join(ASK.pack(b"G", number) for number in asked))
            for listed_piece, data in zip(listed, here):
                got = _take_piece(connection, listed_piece) if data is None else data
                self.add(got, listed_piece, "network" if data is None else "disk")
                news = time.time()
        raise Lost("nothing new came for {} s".format(STUCK_S))

    def use(self, key: str) -> bool:
        """Take the image on this disk as this node's copy; return False if there is none."""
        pieces = self.folder.listed(key)
        if pieces is None:
            return False
        if self.copy.file is not None:
            os.unlink(self.copy.file.name)
        self.copy.file = open(self.folder.at(key + ".image"), "rb")
        os.utime(self.folder.at(key + ".list"))  # when it was used last
        self.counts["had"] = 1
        self.copy.say(pieces, key, whole=True)
        return True

    def begin(self, size: int) -> None:
        """Create the copy of an image of `size` bytes. Raises OSError, Lost."""
        self.folder.room(size)
        self.folder.learn()
        path = self.folder.at("{}-{}.part".format(self.number, os.urandom(8).hex()))
        handle = os.open(path + ".new", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
        lock(handle)  # as long as this process runs
        os.rename(path + ".new", path)  # now that no other job can take it for a killed job's
        self.copy.file = open(path, "r+b", 0)

    def add(self, data: bytes, piece: Piece, counter: str) -> None:
        """Append a piece to the copy. Raises OSError."""
        assert self.copy.file is not None
        try:
            if self.copy.file.write(data) != len(data):
                # Not Lost: what comes from another node would be written behind the part of this piece.
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), self.folder.path)
        except OSError:
            os.unlink(self.copy.file.name)  # it would fill the disk, which the job may need
            raise
        self.counts[counter] += len(data)
        self.copy.say([piece])

    def end(self) -> str:
        """Rename the complete copy to its final name; return its key. Raises OSError."""
        assert self.copy.file is not None
        pieces, folder = self.copy.pieces, self.folder
        key = hashlib.sha256(b"".join(PIECE.pack(*piece) for piece in pieces)).hexdigest()
        os.rename(self.copy.file.name, folder.at(key + ".image"))
        listed = [(size, digest.hex()) for size, digest in pieces]
        folder.write(key + ".list", json.dumps([seal(os.stat(folder.at(key + ".image"))), listed]))
        self.copy.say(key=key, whole=True)
        folder.tidy()
        return key

    def wait(self) -> None:
        """Wait until the nodes below have the image or are lost, and add their reports to this node's."""
        below = [child for child in (2 * self.number + 1, 2 * self.number + 2) if child < self.nodes]
        with self.copy.changed:
            self.copy.asked = time.time()
            while not all(child in self.copy.reports for child in below) and time.time() - self.copy.asked < ORPHANS_S:
                self.copy.changed.wait(1)
            for row in self.copy.reports.values():
                for name in _SUMS:
                    self.counts[name] += row[name]

    def report(self) -> None:
        """Send this node's counts to the nearest ancestor that answers."""
        text = json.dumps(self.counts).encode()
        for connection, _, _ in self.ancestors():
            connection.sendall(ASK.pack(b"D", len(text)) + text)
            return


def _take_piece(connection: socket.socket, piece: Piece) -> bytes:
    """Receive a piece. Raises Lost, OSError."""
    data = take(connection, piece[0])
    if piece_of(data) != piece:
        raise Lost("a piece was changed on its way")
    return data
