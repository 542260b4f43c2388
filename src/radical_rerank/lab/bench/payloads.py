"""Bytes that were made to do harm: what the service must bear, for its tests and its benchmark."""

from __future__ import annotations

import base64
import io
import json
import struct

from PIL import Image


def polyglot(webp: tuple[int, int], im: tuple[int, int]) -> bytes:
    """A WebP of one size that is also an IM file of another, to a reader that tries that format first."""
    header = b"\nImage type: Greyscale image\nImage size (x*y): %d*%d\n\x1a" % im
    # WebP's arithmetic decoder takes nearly any bytes for a picture; these three let it start.
    partition = b"DDD" + header + bytes(4000)
    tag = struct.pack("<I", 1 << 4 | len(partition) << 5)[:3]
    size = 0x3A40  # 0x3A is a colon: the file's first line is then a field of IM
    frame = (tag + b"\x9d\x01\x2a" + struct.pack("<HH", *webp) + partition).ljust(size - 12, b"\0")
    riff = b"RIFF" + struct.pack("<I", size) + b"WEBPVP8 " + struct.pack("<I", len(frame)) + frame
    return riff + bytes(im[0] * im[1])


def many_scans(width: int, height: int, scans: int) -> bytes:
    """A progressive JPEG that refines its coefficients so many times: little to send, long to decode."""
    Image.new("L", (width, height), 128).save(file := io.BytesIO(), "JPEG", progressive=True, quality=50)
    data = file.getvalue()
    starts = [i for i in range(len(data) - 1) if data[i : i + 2] == b"\xff\xda"]
    # The last scan, without the tables before it, as often as wanted.
    last = data[starts[-1] : -2]
    return data[:-2] + last * scans + b"\xff\xd9"


def numbers(size: int) -> bytes:
    """A request of so many bytes whose documents are numbers: each fails as every form of a document."""
    return b'{"query": "x", "documents": [' + b"0," * (size // 2) + b"0]}"


def brackets(size: int) -> bytes:
    """A request of so many bytes that is 20 times as large when it is parsed."""
    return b'{"query": "x", "documents": [' + b"[]," * (size // 3) + b"[]]}"


def request(*pictures: bytes, query: str = "a red star") -> bytes:
    """A request that shows these encoded pictures."""
    documents = [base64.b64encode(picture).decode() for picture in pictures]
    return json.dumps({"query": query, "documents": documents}).encode()


def picture(width: int, height: int, kind: str = "PNG") -> bytes:
    Image.new("RGB", (width, height), "red").save(file := io.BytesIO(), kind)
    return file.getvalue()
