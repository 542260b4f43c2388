"""What an operator may set. Every field is also an environment variable, RADICAL_SERVE_<FIELD>."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field, field_validator, model_validator
from pydantic_settings import BaseSettings, SettingsConfigDict

from radical_rerank.backbones import DEFAULT_MODEL


class Settings(BaseSettings):
    """Limits are per request unless said otherwise."""

    model_config = SettingsConfigDict(env_prefix="RADICAL_SERVE_", extra="forbid")

    model: str = DEFAULT_MODEL
    method: str = "radical"
    keep: float = Field(0.2, gt=0, le=1)
    device: str | None = None
    dtype: str | None = None

    queue: int = Field(32, ge=1)
    """requests inside at once, running or waiting; the next one gets 429"""
    patience: float = Field(0.7, ge=0)
    """a request that would wait longer than so many rankings take gets 429 at once, so that those which are
    let in keep their latency; larger values ride out bursts instead"""
    deadline: float = Field(60.0, gt=0)
    """seconds until a waiting or running request gets 504"""
    max_batch: int = Field(4, ge=1)
    """requests that may run through the model together"""

    max_body: int = Field(64 << 20, ge=1024)
    body_timeout: float = Field(30.0, gt=0)
    """seconds in which a request's body must have come"""
    max_documents: int = Field(200, ge=1)
    max_query_tokens: int = Field(512, ge=1)
    max_pixels: int = Field(32_000_000, ge=1)
    """of one image"""
    max_total_pixels: int = Field(45_000_000, ge=1)
    """of a request's images together"""
    max_memory: int = 320 << 20
    """bytes that all requests together may hold in bodies, fetched files and decoded pixels (4 bytes each);
    the last quarter is for small requests"""
    max_reading: int = Field(128, ge=1)
    """requests that wait for bytes at once; beyond it the one that has waited longest gets 429"""
    readers: int = Field(2, ge=2)
    """processes that parse requests and decode images; one is kept for light requests"""
    reader_memory: int = 448 << 20
    """address space of such a process, in bytes"""
    read_timeout: float = Field(10.0, gt=0)
    """seconds in which a request must be parsed and its images decoded"""

    api_keys: list[str] = []
    allowed_hosts: list[str] = []
    """hosts that image URLs may name; none by default"""
    trusted_hosts: list[str] = []
    """names that clients may call the service by; any by default"""
    cors_origins: list[str] = []
    fetch_timeout: float = Field(10.0, gt=0)
    """seconds for all of one URL"""
    fetch_max_bytes: int = Field(20 << 20, ge=1024)

    @field_validator("api_keys")
    @classmethod
    def _keys(cls, keys: list[str]) -> list[str]:
        keys = [key.strip() for key in keys]
        if not all(keys):
            raise ValueError("a key is empty: anybody could send it; is a variable not set?")
        return keys

    @model_validator(mode="after")
    def _room(self) -> Settings:
        """One request at its limits must fit: large requests share three quarters of the memory."""
        needs = {
            "max_memory": -(-(self.max_body + 4 * self.max_total_pixels) * 4 // 3),
            # A reader's own, and the body, its text and the files in it, or those files and a picture.
            "reader_memory": (160 << 20) + max(3 * self.max_body, self.max_body + 4 * self.max_pixels),
        }
        for name, need in needs.items():
            if getattr(self, name) < need:
                raise ValueError(f"{name} must be at least {need} for requests of max_body and max_pixels")
        return self

    @property
    def shown_model(self) -> str:
        """The model as clients may see it: a folder's name without where it lies."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model
