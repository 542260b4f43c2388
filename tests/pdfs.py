"""PDF files, written by hand."""

from __future__ import annotations

import hashlib
import io
from collections.abc import Sequence
from dataclasses import dataclass

from PIL import Image


@dataclass(frozen=True)
class Leaf:
    """A page to write.

    lines: its text; box: its MediaBox; crop: its CropBox; rotate: degrees, clockwise
    draw: more commands of its content; picture: drawn over the whole page
    """

    lines: Sequence[str] = ()
    box: Sequence[float] = (0, 0, 595, 842)
    crop: Sequence[float] | None = None
    rotate: int = 0
    draw: str = ""
    picture: Image.Image | None = None


def write_pdf(leaves: Sequence[Leaf], *, password: str | None = None) -> bytes:
    """Write a PDF. With a password, its texts are not encrypted, but no reader may open it without."""
    objects: dict[int, bytes] = {}
    kids = [10 + 10 * number for number in range(len(leaves))]
    for number, leaf in zip(kids, leaves, strict=True):
        objects |= _page(number, leaf)
    listed = " ".join(f"{kid} 0 R" for kid in kids)
    objects[1] = b"<< /Type /Catalog /Pages 2 0 R >>"
    objects[2] = f"<< /Type /Pages /Count {len(kids)} /Kids [{listed}] >>".encode()
    objects[3] = b"<< /Type /Font /Subtype /Type1 /BaseFont /Helvetica /Encoding /WinAnsiEncoding >>"
    extra = ""
    if password is not None:
        objects[4] = _encryption(password.encode(), b"0" * 16)
        extra = f"/Encrypt 4 0 R /ID [<{b'0'.hex() * 16}> <{b'0'.hex() * 16}>]"
    out, places = io.BytesIO(), {}
    out.write(b"%PDF-1.7\n")
    for number in sorted(objects):
        places[number] = out.tell()
        out.write(f"{number} 0 obj\n".encode() + objects[number] + b"\nendobj\n")
    start = out.tell()
    out.write(b"xref\n0 1\n0000000000 65535 f \n")
    for number, place in places.items():
        out.write(f"{number} 1\n{place:010} 00000 n \n".encode())
    size = max(objects) + 1
    out.write(f"trailer << /Size {size} /Root 1 0 R {extra} >>\nstartxref\n{start}\n%%EOF\n".encode())
    return out.getvalue()


def _page(number: int, leaf: Leaf) -> dict[int, bytes]:
    left, bottom, right, top = leaf.box
    content = leaf.draw.encode()
    if leaf.picture is not None:
        content += f" q {right - left} 0 0 {top - bottom} {left} {bottom} cm /Im Do Q".encode()
    for row, line in enumerate(leaf.lines):
        shown = line.replace("\\", "\\\\").replace("(", "\\(").replace(")", "\\)").encode("cp1252")
        content += f" BT /F 12 Tf {left + 40} {top - 60 - 20 * row} Td (".encode() + shown + b") Tj ET"
    crop = "" if leaf.crop is None else f"/CropBox {list(leaf.crop)}".replace(",", "")
    box = str(list(leaf.box)).replace(",", "")
    page = (
        f"<< /Type /Page /Parent 2 0 R /MediaBox {box} {crop} /Rotate {leaf.rotate} "
        f"/Contents {number + 1} 0 R "
        f"/Resources << /Font << /F 3 0 R >> /XObject << /Im {number + 2} 0 R >> >> >>"
    )
    objects = {number: page.encode(), number + 1: _stream("", content)}
    if leaf.picture is not None:
        buffer = io.BytesIO()
        leaf.picture.save(buffer, "JPEG", quality=95)
        width, height = leaf.picture.size
        kind = "/Type /XObject /Subtype /Image /ColorSpace /DeviceRGB /BitsPerComponent 8 /Filter /DCTDecode"
        objects[number + 2] = _stream(f"{kind} /Width {width} /Height {height}", buffer.getvalue())
    return objects


def _stream(entries: str, data: bytes) -> bytes:
    return f"<< {entries} /Length {len(data)} >>\nstream\n".encode() + data + b"\nendstream"


# Encryption with a 40-bit key, version 1 of the PDF standard's own handler.

_PADDING = bytes.fromhex("28BF4E5E4E758A4164004E56FFFA01082E2E00B6D0683E802F0CA9FE6453697A")


def _encryption(password: bytes, identity: bytes) -> bytes:
    padded = (password + _PADDING)[:32]
    owner = _rc4(hashlib.md5(padded).digest()[:5], padded)
    allowed = -4
    secret = hashlib.md5(padded + owner + allowed.to_bytes(4, "little", signed=True) + identity).digest()[:5]
    user = _rc4(secret, _PADDING)
    return f"<< /Filter /Standard /V 1 /R 2 /O <{owner.hex()}> /U <{user.hex()}> /P {allowed} >>".encode()


def _rc4(key: bytes, data: bytes) -> bytes:
    box, j = list(range(256)), 0
    for i in range(256):
        j = (j + box[i] + key[i % len(key)]) % 256
        box[i], box[j] = box[j], box[i]
    out, i, j = bytearray(), 0, 0
    for byte in data:
        i = (i + 1) % 256
        j = (j + box[i]) % 256
        box[i], box[j] = box[j], box[i]
        out.append(byte ^ box[(box[i] + box[j]) % 256])
    return bytes(out)
