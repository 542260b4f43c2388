"""A Hugging Face model as this package sees it: its parts, its identity, and the `Backbone` that runs it."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Protocol

import torch
from PIL import Image
from torch import Tensor

from radical_rerank.backbones.families import FAMILIES, REFUSED, Family
from radical_rerank.backbones.families.base import FULL, LINEAR, WINDOW, ImageFeatures, Pixels
from radical_rerank.backbones.hooks import one_row, stopping
from radical_rerank.embedded import DEFAULT_MODEL as DEFAULT_MODEL
from radical_rerank.embedded import MODELS  # the one place that knows the models that ship
from radical_rerank.errors import InputError, RadicalError, UnsupportedModelError
from radical_rerank.method import DecoderShape
from radical_rerank.pruning import ModelIdentity

# The parts of a model.


def family_of(config: Any) -> Family:
    """Return the adapter for a model's configuration, or raise an error that names what is not supported."""
    kind = getattr(config, "model_type", type(config).__name__)
    text: Any = getattr(config, "text_config", None)
    if kind not in FAMILIES:
        why = f" ({REFUSED[kind]})" if kind in REFUSED else ""
        raise UnsupportedModelError(
            f"model type {kind!r} is not supported{why}; choose from: {', '.join(sorted(FAMILIES))}"
        )
    family, text_type = FAMILIES[kind](config), getattr(text, "model_type", None)
    if text_type not in family.text_types:
        raise UnsupportedModelError(
            f"{kind} on a {text_type!r} text model is not supported; choose from: "
            f"{', '.join(family.text_types)}"
        )
    window = WINDOW if getattr(text, "sliding_window", None) else FULL
    kinds = getattr(text, "layer_types", None) or [window] * text.num_hidden_layers
    family.kinds = tuple(kinds)
    family.attending = tuple(layer for layer, own in enumerate(kinds) if own != LINEAR)
    family.readable = tuple(layer for layer, own in enumerate(kinds) if own == FULL)
    unknown = sorted(set(kinds) - set(family.known_kinds))
    if unknown:
        raise UnsupportedModelError(f"{kind} with layers of {unknown[0].replace('_', ' ')} is not supported")
    return family


def unwrapped(model: Any) -> Any:
    """Return the Hugging Face model inside a torch.compile, PEFT or data-parallel wrapper."""
    while True:
        if hasattr(model, "_orig_mod"):
            model = model._orig_mod
        elif hasattr(model, "get_base_model"):
            model = model.get_base_model()
        elif isinstance(model, (torch.nn.DataParallel, torch.nn.parallel.DistributedDataParallel)):
            model = model.module
        else:
            return model


def base_model(model: Any) -> Any:
    """Return the model without its output head."""
    model = unwrapped(model)
    return model.model if hasattr(model, "lm_head") else model


def text_model(model: Any) -> Any:
    """Return the decoder of a supported model. It has `layers`, called with keyword arguments."""
    if not hasattr(model, "config"):
        raise UnsupportedModelError(f"{type(model).__name__} is not a Hugging Face model")
    return getattr(base_model(model), family_of(model.config).decoder)


def device_of(module: Any) -> torch.device:
    """Return the device that a module computes on.

    accelerate may keep its weights elsewhere (in memory, on disk) and move them there for each call.
    """
    weight = next(module.parameters())
    # Weights that lie elsewhere are on the meta device. The first hook in or on the module says where to.
    for part in module.modules() if weight.is_meta else (module,):
        hook = getattr(part, "_hf_hook", None)
        for one in getattr(hook, "hooks", (hook,)):
            place = getattr(one, "execution_device", None)
            if place is not None:
                return torch.device(place)
    return torch.device(weight.device)


def last_row_only(model: Any) -> AbstractContextManager[None]:
    """Inside, the last decoder layer runs for the prompt's last row alone, since no other row is read.

    The model's output then has this one row. Enter it inside a Pruner's context, so that it runs after the
    last stage.
    """
    text = text_model(model)
    return one_row(unwrapped(model), text, device_of(text.layers[-1]), family_of(model.config))


def decoder_shape(config: Any) -> DecoderShape:
    """Return the decoder's dimensions, for counting costs."""
    family, text = family_of(config), config.text_config
    shape = DecoderShape(
        num_layers=text.num_hidden_layers,
        hidden=text.hidden_size,
        heads=text.num_attention_heads,
        kv_heads=text.num_key_value_heads,
        head_dim=getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads,
        mlp=getattr(text, "intermediate_size", 0),
    )
    if set(family.kinds) == {FULL} and not getattr(text, "num_experts", None):
        return shape
    return replace(shape, layers=tuple(family.layer_cost(layer, shape) for layer in range(shape.num_layers)))


# The identity of a model.


def identity_of(model: Any) -> ModelIdentity:
    """Return a model's name, fingerprint and decoder shape."""
    config = unwrapped(model).config
    name = getattr(config, "_name_or_path", "")
    return ModelIdentity(name, fingerprint_of(model), decoder_shape(config), folder_of(name))


def folder_of(name: str) -> Path | None:
    """Return the folder of a model that was loaded by this name, if it may be one."""
    return MODELS[name].folder if name in MODELS else Path(name) if name else None


def fingerprint_of(model: Any) -> str:
    """Return 16 hexadecimal digits: a digest of a model's configuration and all its weights.

    The same checkpoint loaded in another dtype that holds its values has the same fingerprint. Changing a
    weight in place changes it.
    """
    # Reading all weights of a large model takes seconds, so it is repeated only after a change.
    own = getattr(unwrapped(model), "config", None)  # an embedder of another library may have none
    config = "" if own is None else config_digest(own)
    weights = _plain_tensors(model, read=False)
    state = config, tuple((tensor.data_ptr(), tensor._version) for _, tensor in weights)
    known = _fingerprints.get(model)
    if known is None or known[0] != state:
        digest = hashlib.sha256(config.encode())
        for name, tensor in _plain_tensors(model, read=True):
            digest.update(f"{name} {tuple(tensor.shape)} {_checksum(tensor)}".encode())
        known = _fingerprints[model] = state, digest.hexdigest()[:16]
    return known[1]


_fingerprints: weakref.WeakKeyDictionary[Any, tuple[Any, str]] = weakref.WeakKeyDictionary()


def config_digest(config: Any) -> str:
    """Return 16 hexadecimal digits: a digest of what a configuration says about the computation.

    Only values that differ from the library's defaults count, since a later version may add new defaults. A
    configuration inside another is compared with its own defaults.
    """
    text = json.dumps(_differing(config), sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


# Settings of loading, saving and calling do not change the computation.
_IGNORED = ("_name_or_path", "transformers_version", "dtype", "torch_dtype", "use_cache")


def _differing(config: Any) -> dict[str, Any]:
    """Return the values of a configuration that are not the defaults of its class, and its model type."""
    values, default = config.to_dict(), {**type(config)().to_dict(), "model_type": None}
    differing = {}
    for name, value in values.items():
        inner = getattr(config, name, None)
        if hasattr(inner, "model_type"):
            differing[name] = _differing(inner)
        elif name not in _IGNORED and "attn_impl" not in name and value != default.get(name):
            differing[name] = value
    return differing


def _plain_tensors(model: Any, *, read: bool) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the plain tensors of every weight, in the order of their names.

    A quantized weight may consist of several tensors. One that lies on disk is read, if asked for; else it
    is an empty tensor of the meta device.
    """
    for name, tensor in sorted(model.state_dict().items()):
        if not isinstance(tensor, Tensor):  # what a quantizer keeps beside its weights
            continue
        if read and tensor.is_meta:
            from transformers.integrations.accelerate import load_offloaded_parameter

            tensor = load_offloaded_parameter(model, name)
        yield from ((name, part) for part in _parts(tensor))


def _parts(tensor: Tensor) -> Iterator[Tensor]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield tensor.detach()
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _parts(getattr(tensor, name))


_CHUNK = 1 << 22


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of all values as float32, which holds half precision without loss."""
    flat, value = tensor.detach().reshape(-1), 0
    for part in flat.split(_CHUNK):
        value = zlib.crc32((part.float() if part.is_floating_point() else part).cpu().numpy(), value)
    return value


# A loaded model.


class HasSize(Protocol):
    """An image, or anything else that has a (width, height)."""

    @property
    def size(self) -> tuple[int, int]: ...


@dataclass
class Backbone:
    """A vision-language model with its tokenizer and image processor. `from_pretrained` loads one.

    Args:
        model: a supported Hugging Face model
        tokenizer: its tokenizer
        image_processor: its image processor

    Example:
        >>> backbone = Backbone.from_pretrained("scenes")
        >>> backbone.name, backbone.shape.num_layers
        ('scenes', 12)
    """

    model: Any
    tokenizer: Any
    image_processor: Any

    def __post_init__(self) -> None:
        self.text = text_model(self.model)
        self.family: Family = family_of(self.model.config)
        self.shape: DecoderShape = decoder_shape(self.model.config)
        self.image_token_id: int = self.model.config.image_token_id
        self.shipped = MODELS.get(self.name)
        """set if the model ships with the package"""
        self._lock = threading.RLock()
        self._process = os.getpid()

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self.model, "tokenizer": self.tokenizer, "image_processor": self.image_processor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__init__(**state)  # type: ignore[misc]

    @contextmanager
    def exclusive(self) -> Iterator[None]:
        """Let one thread at a time use the model: tokenizers and accelerators are not safe to share."""
        if os.getpid() != self._process:
            raise RadicalError(
                f"{self.name} was loaded in another process, and a forked process cannot use it. Load it in "
                "the new process, or start that process with spawn"
            )
        with self._lock:
            yield

    @classmethod
    def from_pretrained(
        cls,
        name: str | Path = DEFAULT_MODEL,
        *,
        device: str | None = None,
        dtype: str | torch.dtype | None = None,
        attn_implementation: str | None = None,
        model_kwargs: Mapping[str, Any] | None = None,
    ) -> Backbone:
        """Load a model.

        Args:
            name: a model id or a folder; by default the small model that ships with the package
            device: by default the accelerator if there is one
            dtype: by default the checkpoint's own on an accelerator, float32 on a CPU
            attn_implementation: passed on to Hugging Face
            model_kwargs: whatever else `from_pretrained` of Hugging Face takes: device_map, max_memory,
                offload_folder, quantization_config, revision … With a device_map, `device` is not used

        Returns:
            The loaded model, in evaluation mode.
        """
        from transformers import (
            AutoConfig,
            AutoImageProcessor,
            AutoModelForImageTextToText,
            AutoTokenizer,
            PreTrainedConfig,
        )

        asked = str(name)
        source = str(folder_of(asked) or asked)
        if source.startswith((".", "/", "~")) and not Path(source).is_dir():
            raise InputError(f"there is no folder {source}")
        options, device = _loading(device, dtype, attn_implementation, dict(model_kwargs or {}))
        where = {name: options[name] for name in _FILE_OPTIONS if name in options}
        try:
            own = _adapted(source, where) or source
            if PreTrainedConfig.get_config_dict(own, **where)[0].get("model_type") == "internvl_lite":
                from radical_rerank.backbones import lite_vision  # noqa: F401, registers the type
            config = AutoConfig.from_pretrained(own, trust_remote_code=False, **where)
            family_of(config)  # before any weights are read
            model = AutoModelForImageTextToText.from_pretrained(source, **options)
            tokenizer = AutoTokenizer.from_pretrained(own, **where)
            image_processor = AutoImageProcessor.from_pretrained(own, **where)
            if tokenizer.chat_template is None:
                tokenizer.chat_template = _processor_chat_template(own, where)
        except RadicalError:
            raise
        except Exception as error:  # a broken file can make the libraries raise anything
            reason = next(iter(str(error).strip().splitlines()), type(error).__name__)
            raise InputError(f"cannot load the model {asked!r}: {reason}") from error
        model.config._name_or_path = asked
        if device is not None:
            model = model.to(device)
        return cls(model.eval(), tokenizer, image_processor)

    @property
    def name(self) -> str:
        """The id or folder that the model was loaded from."""
        return str(self.model.config._name_or_path)

    @property
    def identity(self) -> ModelIdentity:
        """Name, fingerprint and decoder shape."""
        return identity_of(self.model)

    @property
    def fingerprint(self) -> str:
        """A digest of the configuration and all weights, whatever the model is called."""
        return fingerprint_of(self.model)

    @property
    def input_digest(self) -> str:
        """A digest of the tokenizer and the image processor."""
        vocabulary = sorted(self.tokenizer.get_vocab().items())
        # Private fields say how the processor was loaded, not what it computes.
        processor = {k: v for k, v in self.image_processor.to_dict().items() if not k.startswith("_")}
        facts = [vocabulary, self.tokenizer.chat_template, processor]
        return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:16]

    @property
    def device(self) -> torch.device:
        """The device that takes the prompt, of a model on several."""
        return device_of(self.model.get_input_embeddings())

    @property
    def devices(self) -> list[str]:
        """All devices that the decoder computes on, in the order of its layers."""
        return list(dict.fromkeys(str(device_of(layer)) for layer in self.text.layers))

    @property
    def dtype(self) -> str:
        """The dtype of the weights: float32, bfloat16 …"""
        return str(self.model.dtype).removeprefix("torch.")

    def stopping(self, stop: Callable[[], bool]) -> AbstractContextManager[None]:
        """Inside, forward passes end with a StoppedError once `stop` returns True.

        It is called before each block of the encoder and each layer of the decoder.
        """
        blocks = self.family.encoder_blocks(base_model(self.model))
        return stopping((unwrapped(self.model), self.text), [*blocks, *self.text.layers], stop)

    def preprocess(self, image: Image.Image, max_tokens: int) -> Pixels:
        """Prepare an RGB image for the encoder, scaled down to at most `max_tokens` visual tokens."""
        return self.family.preprocess(self.image_processor, image, max_tokens)

    def count_tokens(self, image: HasSize, max_tokens: int) -> int:
        """Return how many visual tokens `preprocess` would give the image."""
        return self.family.count_tokens(self.image_processor, image.size, max_tokens)

    @torch.inference_mode()
    def encode(self, pixels: Sequence[Pixels], signals: bool = False) -> list[ImageFeatures]:
        """Encode these images together; with the encoder's signals if requested."""
        if not pixels:
            return []
        base = base_model(self.model)
        device = device_of(getattr(base, self.family.encoder))
        placed = [replace(each, values=each.values.to(device)) for each in pixels]
        return self.family.encode(base, placed, signals)

    def inputs(self, prompts: Sequence[Sequence[int]], features: Sequence[ImageFeatures]) -> dict[str, Any]:
        """Return the model arguments for a batch of prompts (token ids), padded on the left.

        features: the images of all prompts, in order
        """
        longest = max(len(ids) for ids in prompts)
        pad = self.tokenizer.pad_token_id or 0
        rows = [[pad] * (longest - len(ids)) + list(ids) for ids in prompts]
        mask = [[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]
        input_ids = torch.tensor(rows, device=self.device)
        inputs = {"input_ids": input_ids, "attention_mask": torch.tensor(mask, device=self.device)}
        if features:
            inputs |= self.family.inputs(features, input_ids)
        positions = self.family.positions(inputs["attention_mask"])
        return inputs if positions is None else {**inputs, "position_ids": positions}

    @torch.inference_mode()
    def next_token_logits(self, inputs: dict[str, Any]) -> Tensor:
        """Return (B, vocabulary) float32 logits of the token that follows each prompt."""
        with last_row_only(self.model):
            output = self.model(**inputs, logits_to_keep=1, use_cache=False)
        logits: Tensor = output.logits[:, -1].float()
        return logits

    @torch.inference_mode()
    def last_hidden(self, inputs: dict[str, Any]) -> Tensor:
        """Return (B, d) float32 hidden states of each prompt's last token, after the final norm."""
        base = base_model(self.model)
        with last_row_only(base):
            output = base(**inputs, use_cache=False)
        hidden: Tensor = output.last_hidden_state[:, -1].float()
        return hidden

    @torch.inference_mode()
    def write(self, inputs: dict[str, Any], max_new_tokens: int) -> list[str]:
        """Return the text that the model generates after each prompt, greedily."""
        with last_row_only(self.model):
            output = self.model.generate(
                **inputs,
                max_new_tokens=max_new_tokens,
                do_sample=False,
                # A checkpoint's sampling settings do not apply to greedy decoding.
                temperature=None,
                top_p=None,
                top_k=None,
                pad_token_id=self.tokenizer.pad_token_id or 0,
            )
        texts: list[str] = self.tokenizer.batch_decode(
            output[:, inputs["input_ids"].shape[1] :], skip_special_tokens=True
        )
        return texts


_FILE_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "token")
"""options of `from_pretrained` that say where the files are: the tokenizer's, too"""


def _loading(
    device: str | None,
    dtype: str | torch.dtype | None,
    attn_implementation: str | None,
    options: dict[str, Any],
) -> tuple[dict[str, Any], str | None]:
    """Return the options for Hugging Face, and the device to move the model to; None: it is placed already.

    options: the user's own
    """
    for name, value in (("dtype", dtype), ("attn_implementation", attn_implementation)):
        if value is None:
            continue
        if options.get(name, value) != value:
            raise InputError(f"{name} is {value!r}, but model_kwargs says {options[name]!r}: give one")
        options[name] = value
    if device is not None and options.get("device_map") is not None:
        raise InputError("give either a device or model_kwargs with a device_map, not both")
    chosen = device or str(torch.accelerator.current_accelerator() or "cpu")
    dtype = options.get("dtype")
    if dtype is None:
        # A model that is spread or quantized is a large one: on a CPU, too, it comes as it is.
        special = options.get("device_map") is not None or options.get("quantization_config") is not None
        options["dtype"] = torch.float32 if chosen == "cpu" and not special else "auto"
    elif dtype != "auto" and isinstance(dtype, str) and not isinstance(getattr(torch, dtype, 0), torch.dtype):
        raise InputError(f"unknown dtype {dtype!r}; use float32, bfloat16 or float16")
    if options.get("quantization_config") is not None:
        # Quantized weights are made where they will be used; some cannot be moved later.
        options.setdefault("device_map", {"": chosen})
    return options, None if options.get("device_map") is not None else chosen


def _adapted(source: str, where: dict[str, Any]) -> str | None:
    """Return the model that a checkpoint adapts, if it is an adapter alone: a LoRA without a configuration.

    Its configuration, tokenizer and image processor are that model's. The weights of both are loaded together
    by Hugging Face, which needs the library peft.
    """
    from transformers.utils import cached_file, is_peft_available

    options = {**where, "_raise_exceptions_for_missing_entries": False}
    path = cached_file(source, "adapter_config.json", **options)
    if path is None or cached_file(source, "config.json", **options) is not None:
        return None
    if not is_peft_available():
        raise InputError(f"{source} is a LoRA adapter, and loading one needs peft: pip install peft")
    return str(json.loads(Path(path).read_text(encoding="utf-8"))["base_model_name_or_path"])


def _processor_chat_template(name: str, files: dict[str, Any]) -> str | None:
    """Return the chat template of a checkpoint that stores it with its processor, not its tokenizer."""
    from transformers.utils import cached_file

    for file in ("chat_template.jinja", "chat_template.json"):
        path = cached_file(name, file, _raise_exceptions_for_missing_entries=False, **files)
        if path is not None:
            text = Path(path).read_text(encoding="utf-8")
            return str(json.loads(text)["chat_template"]) if file.endswith("json") else text
    return None
