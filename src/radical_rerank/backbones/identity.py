"""What a model is, whatever it is called."""

from __future__ import annotations

import hashlib
import json
import weakref
import zlib
from typing import Any

from torch import Tensor

from radical_rerank.backbones.families import decoder_shape, unwrapped
from radical_rerank.pruning import ModelIdentity


def identity_of(model: Any) -> ModelIdentity:
    config = unwrapped(model).config
    return ModelIdentity(getattr(config, "_name_or_path", ""), fingerprint_of(model), decoder_shape(config))


def fingerprint_of(model: Any) -> str:
    """16 hexadecimal digits: a digest of a model's configuration and of all its weights.

    The same checkpoint loaded in another dtype that holds its values has the same fingerprint. Changing a
    weight in place changes it.
    """
    weights = dict(sorted(model.state_dict().items()))
    # Reading all weights of a large model takes seconds: it is done again only after a change.
    config = config_digest(unwrapped(model).config)
    state = config, tuple((tensor.data_ptr(), tensor._version) for tensor in weights.values())
    known = _known.get(model)
    if known is None or known[0] != state:
        digest = hashlib.sha256(config.encode())
        for name, tensor in weights.items():
            digest.update(f"{name} {tuple(tensor.shape)} {_checksum(tensor)}".encode())
        known = _known[model] = state, digest.hexdigest()[:16]
    return known[1]


_known: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def config_digest(config: Any) -> str:
    """16 hexadecimal digits: a digest of what a configuration says of the computation.

    Only what differs from the library's defaults: a later version of it may add new ones.
    """
    # How it was loaded, saved or called says nothing of what it computes.
    passing = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")

    def cleaned(value: Any) -> Any:
        if isinstance(value, dict):
            return {k: cleaned(v) for k, v in value.items() if k not in passing and "attn_impl" not in str(k)}
        return value

    text = json.dumps(cleaned(config.to_diff_dict()), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


_CHUNK = 1 << 22


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of all values as float32, which holds half precision without loss. Seconds for a large model."""
    flat, value = tensor.detach().reshape(-1), 0
    for part in flat.split(_CHUNK):
        value = zlib.crc32((part.float() if part.is_floating_point() else part).cpu().numpy(), value)
    return value
