"""Malicious requests and pictures, for the tests and the benchmark of the service."""

from __future__ import annotations

import base64
import io
import json
import struct

from PIL import Image


def polyglot(webp: tuple[int, int], im: tuple[int, int]) -> bytes:
    """Return a WebP of one size that a reader may also take for an IM file of another size.

    Args:
        webp: width and height of the WebP
        im: width and height of the IM file
    """
    header = b"\nImage type: Greyscale image\nImage size (x*y): %d*%d\n\x1a" % im
    # WebP's arithmetic decoder accepts almost any bytes; these three make it start.
    partition = b"DDD" + header + bytes(4000)
    tag = struct.pack("<I", 1 << 4 | len(partition) << 5)[:3]
    size = 0x3A40  # 0x3A is a colon: it makes the first line a field of IM
    frame = (tag + b"\x9d\x01\x2a" + struct.pack("<HH", *webp) + partition).ljust(size - 12, b"\0")
    riff = b"RIFF" + struct.pack("<I", size) + b"WEBPVP8 " + struct.pack("<I", len(frame)) + frame
    return riff + bytes(im[0] * im[1])


def many_scans(width: int, height: int, scans: int) -> bytes:
    """Return a progressive JPEG with many scans: small to send, slow to decode."""
    Image.new("L", (width, height), 128).save(file := io.BytesIO(), "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    starts = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    # Repeat the last scan, without the tables before it.
    last = data[starts[-1] : -2]
    return data[:-2] + last * scans + b"\xff\xd9"


def numbers(size: int) -> bytes:
    """Return a request of about `size` bytes whose documents are numbers, which are invalid documents."""
    return b'{"query": "x", "documents": [' + b"0," * (size // 2) + b"0]}"


def brackets(size: int) -> bytes:
    """Return a request of about `size` bytes that takes 20 times as much memory when parsed."""
    return b'{"query": "x", "documents": [' + b"[]," * (size // 3) + b"[]]}"


def request(*pictures: bytes, query: str = "a red star") -> bytes:
    """Return a request with these encoded pictures as documents."""
    documents = [base64.b64encode(picture).decode() for picture in pictures]
    return json.dumps({"query": query, "documents": documents}).encode()


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    """Return an encoded red picture of this size."""
    Image.new("RGB", (width, height), "red").save(file := io.BytesIO(), kind)
    return file.getvalue()
