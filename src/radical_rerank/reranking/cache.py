"""Vision features by image content: a gallery image recurs across queries, and is encoded once."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from threading import Lock
from typing import Any

from PIL import Image

from radical_rerank.backbones import ImageFeatures
from radical_rerank.reranking.images import PIECE


def content_key(image: Image.Image, max_tokens: int, signals: bool = False) -> str:
    """Names an RGB image by its pixels, the resolution at which it is encoded, and what is asked of it."""
    digest = hashlib.blake2b(digest_size=16)
    rows = max(1, PIECE // max(1, image.width))
    for start in range(0, image.height, rows):  # piece by piece: no second copy of a large image
        box = (0, start, image.width, min(start + rows, image.height))
        digest.update(image.crop(box).tobytes())
    digest.update(f"{image.size} {max_tokens} {signals}".encode())
    return digest.hexdigest()


class VisionCache:
    """The features of the images used last, up to so many bytes. Safe to share between threads."""

    def __init__(self, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.bytes = self.hits = self.misses = 0
        self._entries: OrderedDict[str, ImageFeatures] = OrderedDict()
        self._lock = Lock()

    def __len__(self) -> int:
        return len(self._entries)

    def __reduce__(self) -> tuple[Any, ...]:
        return VisionCache, (self.max_bytes,)  # a copy elsewhere starts empty

    def get(self, key: str) -> ImageFeatures | None:
        with self._lock:
            features = self._entries.get(key)
            if features is None:
                self.misses += 1
                return None
            self.hits += 1
            self._entries.move_to_end(key)
            return features

    def put(self, key: str, features: ImageFeatures) -> None:
        with self._lock:
            if key in self._entries or features.nbytes > self.max_bytes:
                return
            self._entries[key] = features.owned()
            self.bytes += features.nbytes
            while self.bytes > self.max_bytes:
                _, oldest = self._entries.popitem(last=False)
                self.bytes -= oldest.nbytes

    def clear(self) -> None:
        with self._lock:
            self._entries.clear()
            self.bytes = 0
