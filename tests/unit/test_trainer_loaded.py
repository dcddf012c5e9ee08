"""What the trainer tells of its own process: mapped libraries, connections, interfaces, bandwidth of one process."""

from __future__ import annotations

import ctypes
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ddp_train.args import parse_arguments
from ddp_train.loaded import _address, connections, interfaces, mapped_libraries


@pytest.fixture
def library() -> Path:
    """Some real shared library of this interpreter."""
    import _ctypes

    return Path(_ctypes.__file__)


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("libnccl.so.2", True),
        ("libnccl-net-ofi.so", True),
        ("libnccl-net.so", True),
        ("libfabric.so.1.28.0", True),
        ("libtorch_cuda.so", True),
        ("libncclient.so", False),
        ("libfabrication.so.1", False),
    ],
)
def test_a_mapped_library_is_told_by_its_path(name: str, told: bool, library: Path, tmp_path: Path) -> None:
    folder = tmp_path / "with space"
    folder.mkdir()
    place = folder / name
    shutil.copyfile(library, place)
    assert str(place) not in mapped_libraries()
    loaded = ctypes.CDLL(str(place))
    assert (str(place) in mapped_libraries()) is told
    place.unlink()
    assert (f"{place} (deleted)" in mapped_libraries()) is told
    del loaded


def pair(family: socket.AddressFamily, address: str) -> Iterator[tuple[str, str]]:
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen()
        with socket.create_connection(server.getsockname()[:2]) as client, server.accept()[0]:
            shown = f"[{address}]" if ":" in address else address
            ends = [f"{shown}:{end[1]}" for end in (client.getsockname(), server.getsockname())]
            yield ends[0], ends[1]


@pytest.mark.parametrize(("family", "address"), [(socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")])
def test_connections_are_told_by_both_ends_while_they_are_open(family: socket.AddressFamily, address: str) -> None:
    for client, server in pair(family, address):
        found = connections()
        assert [client, server] in found and [server, client] in found
        # A listening socket is no connection.
        assert all(peer.rpartition(":")[2] != "0" for _, peer in found)
    assert [client, server] not in connections()


def test_an_ipv4_connection_of_an_ipv6_socket_is_told_as_ipv4() -> None:
    with (
        socket.create_server(("::", 0), family=socket.AF_INET6, dualstack_ipv6=True) as server,
        socket.create_connection(("127.0.0.1", server.getsockname()[1])) as client,
        server.accept()[0],
    ):
        own = f"127.0.0.1:{client.getsockname()[1]}"
        assert [f"127.0.0.1:{server.getsockname()[1]}", own] in connections()


@given(st.ip_addresses(), st.integers(0, 65535))
def test_every_address_is_read_as_the_kernel_writes_it(address: object, port: int) -> None:
    import ipaddress
    import sys

    assert isinstance(address, ipaddress.IPv4Address | ipaddress.IPv6Address)
    raw = address.packed
    words = "".join(f"{int.from_bytes(raw[i : i + 4], sys.byteorder):08X}" for i in range(0, len(raw), 4))
    shown, _, number = _address(f"{words}:{port:04X}").rpartition(":")
    plain = ipaddress.ip_address(shown.strip("[]"))
    mapped = getattr(address, "ipv4_mapped", None)
    assert plain == (mapped or address) and int(number) == port


def test_interfaces_are_those_of_the_host() -> None:
    found = interfaces()
    assert "127.0.0.1" in found["lo"]
    assert set(found) <= {name for _, name in socket.if_nameindex()}


def test_bandwidth_takes_seconds() -> None:
    assert parse_arguments(["1", "1"]).bandwidth is None
    assert parse_arguments(["1", "1", "--bandwidth", "0.5"]).bandwidth == 0.5
    for wrong in ("0", "-1", "nan", "fast"):
        with pytest.raises(SystemExit) as stopped:
            parse_arguments(["1", "1", "--bandwidth", wrong])
        assert stopped.value.code == 2
