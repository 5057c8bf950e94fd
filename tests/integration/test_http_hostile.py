"""Requests that servers and proxies understand in different ways: a node refuses them, and never sees one request more or less than was sent."""

from __future__ import annotations

import asyncio
import contextlib
import re
from pathlib import Path

import pytest

from tests.integration.node_support import on_both_loops
from tidings.testing.node import RunningNode, running_node

_GET = b"GET /healthz HTTP/1.1\r\nHost: n\r\n"
_POST = b"POST /v1/events HTTP/1.1\r\nHost: n\r\n"
_CHUNKED = _POST + b"Transfer-Encoding: chunked\r\n\r\n"
_AFTER = b"GET /after HTTP/1.1\r\nHost: n\r\nConnection: close\r\n\r\n"
"""Sent behind each case: its 404 shows where the node believes that the case has ended."""
REFUSED = [400]


async def statuses(node: RunningNode, data: bytes) -> list[int]:
    """The statuses that a node answers on one connection, until it closes it."""
    reader, writer = await asyncio.open_connection("127.0.0.1", int(node.url.rpartition(":")[2]))
    writer.write(data)
    async with asyncio.timeout(20):
        answer = await reader.read()
    writer.close()
    with contextlib.suppress(ConnectionError):
        await writer.wait_closed()
    return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]


_LENGTHS: dict[str, tuple[bytes, list[int]]] = {
    "CL.TE": (_POST + b"Content-Length: 6\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\nG", REFUSED),
    "TE.CL": (_POST + b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n1\r\nG\r\n0\r\n\r\n", REFUSED),
    "TE.TE, the second unknown": (
        _POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
        REFUSED,
    ),
    "TE.TE, the first unknown": (
        _POST + b"Transfer-Encoding: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        REFUSED,
    ),
    "TE twice": (_POST + b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", REFUSED),
    **{
        f"TE {value!r}": (_POST + b"Transfer-Encoding:" + value + b"\r\n\r\n0\r\n\r\n", REFUSED)
        for value in (
            *(
                b" xchunked",
                b"\x0bchunked",
                b"\r\n chunked",
                b" chunked, identity",
                b" gzip, chunked",
                b"",
                b" identity",
            ),
            *(b' "chunked"', b" chunked\x00", b" chunked;q=1", b" cow", b"\x00chunked", b" [chunked]"),
        )
    },
    "TE with a blank before the colon": (_POST + b"Transfer-Encoding : chunked\r\n\r\n0\r\n\r\n", REFUSED),
    "TE in a folded line": (_POST + b" Transfer-Encoding: chunked\r\n\r\n0\r\n\r\n", REFUSED),
    "TE behind a bare LF": (_POST + b"X: y\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", REFUSED),
    "TE behind a bare CR": (_POST + b"X: y\rTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", REFUSED),
    "TE of HTTP/1.0": (b"POST / HTTP/1.0\r\nHost: n\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n", REFUSED),
    "TE in other letters": (_POST + b"transfer-ENCODING: Chunked\r\n\r\n0\r\n\r\n", [401, 404]),
    "two CL": (_POST + b"Content-Length: 3\r\nContent-Length: 4\r\n\r\nabc", REFUSED),
    "two CL alike": (_POST + b"Content-Length: 3\r\nContent-Length: 3\r\n\r\nabc", REFUSED),
    **{
        f"CL {value!r}": (_POST + b"Content-Length:" + value + b"\r\n\r\nabc", REFUSED)
        for value in (
            *(b" +3", b" -3", b" 3 3", b" 3, 3", b" 0x3", b" 3.0", b" 1_0", b"", b" 18446744073709551619", b" \xb2"),
            *(b"\r\n 3", b" 3\x00", b" three", b" 3;"),
        )
    },
    "CL with a blank before the colon": (_POST + b"Content-Length : 3\r\n\r\nabc", REFUSED),
    "CL with blanks around it": (_POST + b"Content-Length: \t 3 \t \r\n\r\nabc", [401, 404]),
    "CL with leading zeros": (_POST + b"Content-Length: 003\r\n\r\nabc", [401, 404]),
    "a body of GET is no request": (
        _GET + b"Content-Length: %d\r\n\r\n" % len(_GET + b"\r\n") + _GET + b"\r\n",
        [200, 404],
    ),
    "a body of HEAD is no request": (
        _GET.replace(b"GET", b"HEAD") + b"Content-Length: %d\r\n\r\n" % len(_GET + b"\r\n") + _GET + b"\r\n",
        [200, 404],
    ),
}
_CHUNKS: dict[str, tuple[bytes, list[int]]] = {
    "whole": (_CHUNKED + b"1\r\nx\r\n0\r\n\r\n", [401, 404]),
    "with an extension": (_CHUNKED + b"1;a=b\r\nx\r\n0\r\n\r\n", [401, 404]),
    "with a trailer": (_CHUNKED + b"1\r\nx\r\n0\r\nX: y\r\n\r\n", [401, 404]),
    "with headers as trailers": (_CHUNKED + b"0\r\nHost: m\r\nConnection: x\r\n\r\n", [401, 404]),
    "with a length as trailer": (_CHUNKED + b"0\r\nContent-Length: 9\r\n\r\n", REFUSED),
    **{
        f"size {size!r}": (_CHUNKED + size + b"\r\nx\r\n0\r\n\r\n", REFUSED)
        for size in (
            *(b"-1", b"+1", b"0x1", b"1 ", b" 1", b"", b"fffffffffffffffff", b"1\x00", b"g", b"1_", b"\t1", b"1;a\x00"),
            *(b"1;a\nb", b"1\n", b"1;a\r"),
        )
    },
    "without CRLF behind it": (_CHUNKED + b"1\r\nxX0\r\n\r\n", REFUSED),
    "bare LF": (_CHUNKED + b"1\nx\n0\n\n", REFUSED),
    "CR and another byte": (_CHUNKED + b"1\rX\nx\r\n0\r\n\r\n", REFUSED),
    "longer than said": (_CHUNKED + b"1\r\nxy\r\n0\r\n\r\n", REFUSED),
}
_HEADS: dict[str, tuple[bytes, list[int]]] = {
    **{
        f"line {line!r}": (line + b"\r\nHost: n\r\n\r\n", REFUSED)
        for line in (
            *(b"GET /healthz HTTP/0.9", b"GET /healthz HTTP/2.0", b"GET /healthz HTTP/1.2", b"GET /healthz HTTP/1.10"),
            *(
                b"GET /healthz http/1.1",
                b"get /healthz HTTP/1.1",
                b"GE(T /healthz HTTP/1.1",
                b"GET\t/healthz\tHTTP/1.1",
            ),
            *(b"GET healthz HTTP/1.1", b"GET * HTTP/1.1", b"GET /heal thz HTTP/1.1", b"GET /\xc3\xa9 HTTP/1.1"),
            *(b"GET /he\x00 HTTP/1.1", b"GET /healthz#x HTTP/1.1", b"CONNECT n:443 HTTP/1.1", b"GET HTTP/1.1"),
            *(b"GET http://u:p@n/healthz HTTP/1.1", b"GET http:///healthz HTTP/1.1", b"PRI * HTTP/2.0"),
        )
    },
    **{
        f"header {line!r}": (_GET + line + b"\r\n\r\n", REFUSED)
        for line in (
            *(b"X: a\x00b", b"X\x00: a", b": a", b"X a", b"X: a\r\n b", b"X: a\r\n\tb", b"X: a\nY: b", b"X: a\rY: b"),
            *(b"X : a", b"X(: a", b"X: a\r", b"Host: n", b"Host: m", b"\xc3\xa9: a", b"X: a\x7f"),
        )
    },
    **{
        f"host {host!r}": (b"GET /healthz HTTP/1.1\r\nHost: " + host + b"\r\n\r\n", REFUSED)
        for host in (b"n m", b"n/m", b"a@n", b"n\\m", b"n#m", b"n?m", b"<n>")
    },
    "no host": (b"GET /healthz HTTP/1.1\r\n\r\n", REFUSED),
    "no host in HTTP/1.0": (b"GET /healthz HTTP/1.0\r\n\r\n", [200]),
    "no head": (b"GET /healthz\r\n\r\n", REFUSED),
    "bare LF only": (b"GET /healthz HTTP/1.1\nHost: n\n\n", REFUSED),
    "empty lines before": (b"\r\n\r\n" + _GET + b"\r\n", [200, 404]),
    "absolute form": (b"GET http://n/healthz HTTP/1.1\r\nHost: m\r\n\r\n", [200, 404]),
    "an asterisk": (b"OPTIONS * HTTP/1.1\r\nHost: n\r\n\r\n", [404, 404]),
    "another upgrade": (_GET + b"Connection: Upgrade\r\nUpgrade: h2c\r\n\r\n", [200, 404]),
    "another upgrade with a body": (
        _POST + b"Connection: Upgrade\r\nUpgrade: h2c\r\nContent-Length: 34\r\n\r\n" + _GET + b"\r\n",
        REFUSED,
    ),
    "the preface of HTTP/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", REFUSED),
    "behind Connection: close": (_GET + b"Connection: close\r\n\r\n" + _GET + b"\r\n", [200]),
    "behind HTTP/1.0": (b"GET /healthz HTTP/1.0\r\nHost: n\r\n\r\n" + _GET + b"\r\n", [200]),
    "HEAD has no body": (_GET.replace(b"GET", b"HEAD") + b"\r\n", [200, 404]),
    "an answer without 100": (_POST + b"Expect: 100-continue\r\nContent-Length: 5\r\n\r\n", [401]),
    "too long": (_GET + b"X: " + b"y" * 70_000 + b"\r\n\r\n", [431]),
    "too many headers": (_GET + b"X:y\r\n" * 14_000 + b"\r\n", [431]),
}


@pytest.mark.parametrize("cases", [_LENGTHS, _CHUNKS, _HEADS], ids=["lengths", "chunks", "heads"])
@on_both_loops
async def test_what_could_be_understood_in_two_ways_is_refused(
    tmp_path: Path, cases: dict[str, tuple[bytes, list[int]]]
) -> None:
    """A request behind each case shows that nothing of the case was taken for a request, whether it arrives at once or by the byte."""
    async with running_node(tmp_path, requests_per_address_max=1_000) as node:
        seen = {name: await statuses(node, data + _AFTER) for name, (data, _) in cases.items()}

    assert seen == {name: expected for name, (_, expected) in cases.items()}


async def test_pieces_of_any_size_are_parsed_alike(tmp_path: Path) -> None:
    """Where a read ends decides nothing: pipelined requests with bodies, cut at every byte, are answered once each and in order."""
    data = (
        _POST
        + b"Content-Length: 4\r\n\r\n\r\n\r\n"
        + _GET
        + b"\r\n"
        + _CHUNKED
        + b"4\r\n\r\n\r\n\r\n0\r\nX: y\r\n\r\n"
        + _AFTER
    )
    async with running_node(tmp_path, requests_per_address_max=1_000) as node:
        port = int(node.url.rpartition(":")[2])

        async def cut(place: int) -> list[int]:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(data[:place])
            for _ in range(5):  # turns of the loop that the node has too
                await asyncio.sleep(0)
            writer.write(data[place:])
            async with asyncio.timeout(20):
                answer = await reader.read()
            writer.close()
            return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d{3}) ", answer)]

        seen = [await cut(place) for place in range(1, len(data))]

    assert seen == [[401, 200, 401, 404]] * (len(data) - 1)
