"""The settings of the service. Each can also be set in the environment, as RADICAL_SERVE_<NAME>."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

from radical_rerank.backbones import DEFAULT_MODEL
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.reranking.budget import Budget
from radical_rerank.reranking.encoding import MAX_TEXT_TOKENS
from radical_rerank.service import (
    DEFAULT_DEADLINE,
    DEFAULT_KEEP,
    DEFAULT_METHOD,
    DEFAULT_PATIENCE,
    DEFAULT_QUEUE,
)
from radical_rerank.service.intake import BYTES_PER_PIXEL, LARGE_LIMIT

with needs_extra("serve"):
    from pydantic import Field, field_validator, model_validator
    from pydantic_settings import BaseSettings, SettingsConfigDict

READER_BASE_BYTES = 160 << 20
"""address space of a reader process without a request"""


class Settings(BaseSettings):
    """What an operator can set. Limits are per request unless stated otherwise; sizes are in bytes.

    Example:
        >>> Settings(keep=0.1, api_keys=["secret"]).keep
        0.1
    """

    model_config = SettingsConfigDict(env_prefix="RADICAL_SERVE_", extra="forbid")

    model: str = DEFAULT_MODEL
    method: str = DEFAULT_METHOD
    keep: float = Field(default=DEFAULT_KEEP, gt=0, le=1)
    speedup: float | None = None
    """one of these four replaces `keep` for requests that name no method and no `keep`"""
    flops: float | None = None
    latency: float | None = None
    agreement: float | None = None
    permutations: Annotated[int, Field(ge=1)] | Literal["auto"] = 1
    """orders of the candidates that are ranked; "auto" is a part of the budget `speedup` or `flops`"""
    preset: str = "auto"
    """how a trained reranker is asked: a preset's name, or none; by default found by the model"""
    scorer: str | None = None
    """logits, generate or pointwise; by default the preset's, else logits"""
    device: str | None = None
    dtype: str | None = None
    model_kwargs: dict[str, Any] | None = None
    """more options for loading the model, passed on to Hugging Face; as JSON in the environment"""

    queue: int = Field(default=DEFAULT_QUEUE, ge=1)
    """requests in flight, running or waiting; the next one gets 429"""
    patience: float = Field(default=DEFAULT_PATIENCE, ge=0)
    """how long a request may wait for the model, in units of one ranking's time; if it would wait longer, it
    gets 429 immediately. Small values keep latency low, large values absorb bursts"""
    deadline: float = Field(default=DEFAULT_DEADLINE, gt=0)
    """seconds until a waiting or running request gets 504"""
    max_batch: int = Field(default=4, ge=1)
    """requests that run through the model together"""

    max_body: int = Field(default=64 << 20, ge=1024)
    body_timeout: float = Field(default=30.0, gt=0)
    """seconds until the whole body must have arrived"""
    max_documents: int = Field(default=200, ge=1)
    max_images: int = Field(default=200, ge=1)
    """of all documents and the query together"""
    max_text: int = Field(default=100_000, ge=1)
    """characters of one document's text"""
    max_total_text: int = Field(default=400_000, ge=1)
    """characters of all texts of a request; the model's tokenizer reads them all"""
    max_text_tokens: int = Field(default=MAX_TEXT_TOKENS, ge=1)
    """longer texts of documents are cut, and the response says so"""
    max_query_tokens: int = Field(default=512, ge=1)
    """of the query's words, and of the instruction"""
    max_prompt_tokens: int = Field(default=65_536, ge=1)
    """visual tokens and tokens of texts that one prompt may have. 52 documents of one large image and one
    long text each have 46,592"""
    max_pixels: int = Field(default=32_000_000, ge=1)
    """of one image"""
    max_total_pixels: int = Field(default=45_000_000, ge=1)
    """of all images of a request"""
    max_memory: int = 320 << 20
    """what all requests together may hold: bodies, fetched files, decoded pixels (4 bytes each). The last
    quarter is reserved for small requests"""
    max_reading: int = Field(default=128, ge=1)
    """requests that wait for bytes at the same time; if there are more, one of those that have waited longest
    gets 429"""
    readers: int = Field(default=2, ge=2)
    """processes that parse requests and decode images; one is reserved for light requests"""
    reader_memory: int = 448 << 20
    """address space of each such process"""
    read_timeout: float = Field(default=10.0, gt=0)
    """seconds until a request must be parsed and its images decoded"""

    api_keys: list[str] = []
    allowed_hosts: list[str] = []
    """hosts that image URLs may name; none by default"""
    trusted_hosts: list[str] = []
    """host names under which clients may call the service; any by default"""
    cors_origins: list[str] = []
    fetch_timeout: float = Field(default=10.0, gt=0)
    """seconds per URL, including redirects"""
    fetch_max_bytes: int = Field(default=20 << 20, ge=1024)

    @field_validator("api_keys")
    @classmethod
    def _check_keys(cls, keys: list[str]) -> list[str]:
        keys = [key.strip() for key in keys]
        if not all(keys):
            raise ValueError("an API key is empty (is an environment variable not set?)")
        return keys

    @model_validator(mode="after")
    def _check_budget(self) -> Settings:
        try:
            Budget(**self._budget).options(self.method)
        except InputError as error:
            raise ValueError(str(error)) from None
        if self.permutations == "auto" and not self._budget.keys() & {"speedup", "flops"}:
            raise ValueError('permutations "auto" needs speedup or flops')
        return self

    @model_validator(mode="after")
    def _check_memory(self) -> Settings:
        """Check that the memory limits have room for one request at its own limits."""
        largest = self.max_body + BYTES_PER_PIXEL * self.max_total_pixels
        # A reader holds the body, its text and the files in it; later those files and one decoded image.
        reading = max(3 * self.max_body, self.max_body + BYTES_PER_PIXEL * self.max_pixels)
        needs = {
            "max_memory": math.ceil(largest / LARGE_LIMIT),
            "reader_memory": READER_BASE_BYTES + reading,
        }
        for name, need in needs.items():
            if getattr(self, name) < need:
                raise ValueError(f"{name} must be at least {need} for requests of max_body and max_pixels")
        return self

    @property
    def _budget(self) -> dict[str, float]:
        names = ("speedup", "flops", "latency", "agreement")
        return {name: value for name in names if (value := getattr(self, name)) is not None}

    @property
    def budget(self) -> dict[str, Any]:
        """The service's own budget, if it is not `keep`: options of the `Reranker`."""
        return {**self._budget, "permutations": "auto"} if self.permutations == "auto" else self._budget

    @property
    def asking(self) -> dict[str, Any]:
        """How the model is asked, whatever the budget: options of every `Reranker`."""
        orders = {} if self.permutations in (1, "auto") else {"permutations": self.permutations}
        names = ("preset", "scorer", "max_text_tokens")
        return {name: getattr(self, name) for name in names} | orders

    def kind(self, method: str | None, keep: float | None) -> tuple[str, float | None]:
        """Return the method and `keep` of a request; None for `keep` if the service's budget counts."""
        if self.budget and method is None and keep is None:
            return self.method, None
        return method or self.method, keep or self.keep

    @property
    def shown_model(self) -> str:
        """The model's name as clients see it: of a folder, only the last part of its path."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model
