"""What an operator may set. Every field is also an environment variable, RADICAL_SERVE_<FIELD>."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field
from pydantic_settings import BaseSettings, SettingsConfigDict

from radical_rerank.files import EMBEDDED


class Settings(BaseSettings):
    """Limits are per request unless said otherwise."""

    model_config = SettingsConfigDict(env_prefix="RADICAL_SERVE_", extra="forbid")

    model: str = EMBEDDED
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
    max_documents: int = Field(200, ge=1)
    max_pixels: int = Field(32_000_000, ge=1)
    """of one image"""
    max_total_pixels: int = Field(200_000_000, ge=1)

    api_keys: list[str] = []
    allowed_hosts: list[str] = []
    """hosts that image URLs may name; none by default"""
    cors_origins: list[str] = []
    fetch_timeout: float = Field(10.0, gt=0)
    fetch_max_bytes: int = Field(20 << 20, ge=1024)

    @property
    def shown_model(self) -> str:
        """The model as clients may see it: a folder's name without where it lies."""
        return Path(self.model).name if Path(self.model).is_dir() else self.model
