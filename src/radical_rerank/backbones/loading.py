"""A loaded model with its tokenizer and image processor, and the way into its forward pass."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families import (
    Family,
    ImageFeatures,
    Pixels,
    decoder_shape,
    family_of,
)
from radical_rerank.backbones.identity import fingerprint_of, identity_of
from radical_rerank.backbones.last_row import last_row_only
from radical_rerank.errors import InputError, LayoutError, RadicalError
from radical_rerank.files import EMBEDDED, model_folder
from radical_rerank.method import DecoderShape
from radical_rerank.pruning import Layout, ModelIdentity


@dataclass
class Backbone:
    """Everything of a vision-language model that reranking needs. `from_pretrained` makes one."""

    model: Any
    tokenizer: Any
    image_processor: Any

    def __post_init__(self) -> None:
        self.family: Family = family_of(self.model.config)
        self.shape: DecoderShape = decoder_shape(self.model.config)
        self.image_token_id: int = self.model.config.image_token_id
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "tokenizer": self.tokenizer, "image_processor": self.image_processor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """One thread at a time. Tokenizers and accelerators do not take kindly to more."""
        if os.getpid() != self._process:
            raise RadicalError(
                f"{self.name} was loaded in another process: a fork does not bring along the threads that "
                "compute, and would hang. Load it in the new process, or start that with spawn"
            )
        with self._lock:
            yield

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = EMBEDDED,
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
    ) -> Backbone:
        """Load from a folder or by model id; by default the small model of scenes that ships in the package.

        device: by default the accelerator if there is one. dtype: by default the checkpoint's own on
        an accelerator, float32 on a CPU.
        """
        from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

        asked, name = str(name), str(model_folder(str(name)))
        if name.startswith((".", "/", "~")) and not Path(name).is_dir():
            raise InputError(f"there is no folder {name}")
        if isinstance(dtype, str) and not isinstance(getattr(torch, dtype, None), torch.dtype):
            raise InputError(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
        if device is None:
            device = str(torch.accelerator.current_accelerator() or "cpu")
        if dtype is None:
            dtype = torch.float32 if device == "cpu" else "auto"
        try:
            config = AutoConfig.from_pretrained(name, trust_remote_code=False)
            family_of(config)  # before any weights are read
            options = {"attn_implementation": attn_implementation} if attn_implementation else {}
            model = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, **options)
            tokenizer = AutoTokenizer.from_pretrained(name)
            image_processor = AutoImageProcessor.from_pretrained(name)
        except RadicalError:
            raise
        except Exception as error:  # whatever a broken file makes the libraries raise
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"cannot load the model {asked!r}: {reason}") from error
        model.config._name_or_path = asked
        if tokenizer.chat_template is None:
            tokenizer.chat_template = _processor_chat_template(name)
        return cls(model.to(device).eval(), tokenizer, image_processor)

    @property
    def name(self) -> str:
        return self.model.config._name_or_path

    @property
    def identity(self) -> ModelIdentity:
        return identity_of(self.model)

    @property
    def fingerprint(self) -> str:
        """What this model is, whatever it is called: a digest of its configuration and of all its weights."""
        return fingerprint_of(self.model)

    @property
    def reading(self) -> str:
        """How words and pictures become numbers: a digest of the tokenizer and of the image processor."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        # How it was loaded says nothing of what it computes.
        processor = {k: v for k, v in self.image_processor.to_dict().items() if not k.startswith("_")}
        facts = [vocabulary, self.tokenizer.chat_template, processor]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def device(self) -> torch.device:
        return self.model.device

    @property
    def dtype(self) -> str:
        """Of its weights: float32, bfloat16 …"""
        return str(self.model.dtype).removeprefix("torch.")

    def preprocess(self, image: Image.Image, max_tokens: int) -> Pixels:
        return self.family.preprocess(self.image_processor, image, max_tokens)

    def count_tokens(self, image: Image.Image, max_tokens: int) -> int:
        """How many visual tokens the image would have."""
        return self.family.count_tokens(self.image_processor, image.size, max_tokens)

    @torch.inference_mode()
    def encode(self, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        """Vision features of these images, encoded together; with the encoder's signals if asked."""
        return self.family.encode(self.model, pixels, signals) if pixels else []

    def inputs(self, prompts: Sequence[Sequence[int]], features: Sequence[ImageFeatures]) -> dict[str, Any]:
        """Model arguments for a batch of token-id prompts, padded on the left, with their images in order."""
        longest = max(len(ids) for ids in prompts)
        pad = self.tokenizer.pad_token_id or 0
        rows = [[pad] * (longest - len(ids)) + list(ids) for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        input_ids = torch.tensor(rows, device=self.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.tensor(mask, device=self.device)}
        if features:
            inputs |= self.family.inputs(self.model, features, input_ids)
        positions = self.family.positions(inputs["attention_mask"])
        return inputs if positions is None else {**inputs, "position_ids": positions}

    @torch.inference_mode()
    def next_token_logits(self, inputs: dict[str, Any]) -> Tensor:
        """(B, vocabulary) logits of the token that follows each prompt, in float32."""
        with last_row_only(self.model):
            output = self.model(**inputs, logits_to_keep=1, use_cache=False)
        return output.logits[:, -1].float()

    @torch.inference_mode()
    def write(self, inputs: dict[str, Any], max_new_tokens: int) -> list[str]:
        """What the model writes after each prompt, greedily."""
        with last_row_only(self.model):
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                # A checkpoint's sampling settings have no meaning for greedy decoding.
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=self.tokenizer.pad_token_id or 0,
            )
        return self.tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )


def _processor_chat_template(name: str) -> str | None:
    """The chat template of a checkpoint that keeps it with its processor rather than its tokenizer."""
    from transformers.utils import cached_file

    for file in ("chat_template.jinja", "chat_template.json"):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False)
        if path is not None:
            text = Path(path).read_text(encoding="utf-8")
            return json.loads(text)["chat_template"] if file.endswith("json") else text
    return None


def layout_of(
    model: Any,
    input_ids: Tensor | Sequence[int],
    *,
    query: Sequence[int] | None = None,
    protected: Sequence[int] = (),
) -> Layout:
    """The layout of one prompt, for use with a stock model: each run of image tokens is an image.

    input_ids: (S,) without padding. query: positions of the query's words, by default all text after
    the last candidate image. protected: the numbers of images that are context, not candidates.
    """
    family_of(model.config)
    ids = input_ids.tolist() if isinstance(input_ids, Tensor) else list(input_ids)
    if ids and not isinstance(ids[0], int):
        raise LayoutError("layout_of describes one prompt: pass input_ids[row] without padding")
    images: list[range] = []
    for position, token in enumerate(ids):
        if token != model.config.image_token_id:
            continue
        if images and images[-1].stop == position:
            images[-1] = range(images[-1].start, position + 1)
        else:
            images.append(range(position, position + 1))
    if not all(0 <= i < len(images) for i in protected):
        raise LayoutError(f"there are {len(images)} images, but {list(protected)} are to be protected")
    candidates = tuple(span for i, span in enumerate(images) if i not in protected)
    if not candidates:
        raise LayoutError("the prompt shows no candidate image")
    context = tuple(images[i] for i in protected)
    taken = set[int]().union(*context)
    if query is None:
        query = [p for p in range(candidates[-1].stop, len(ids)) if p not in taken]
    return Layout(len(ids), candidates, tuple(query), context)
