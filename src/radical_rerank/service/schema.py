"""Requests and answers: what Jina's, Cohere's and vLLM's clients send and read, and our extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field


class ImageUrl(BaseModel):
    url: str


class ImagePart(BaseModel):
    """vLLM's form: {"type": "image_url", "image_url": {"url": "data:…"}}."""

    type: Literal["image_url"]
    image_url: ImageUrl


class ContentDocument(BaseModel):
    """A document of one image. Several images in one content would be one document, which is not ranked."""

    content: Annotated[list[ImagePart], FailFast(), Field(min_length=1, max_length=1)]


class ImageDocument(BaseModel):
    """Jina's form: {"image": data URI, base64 or allowed URL}."""

    image: str


RequestDocument = ImageDocument | ContentDocument | str


class RerankRequest(BaseModel):
    """Fields of Jina, Cohere and vLLM; `reference`, `method`, `keep` and what follows are ours.

    Fields that are not known are ignored: clients of other services send their own.
    """

    query: Annotated[str, Field(min_length=1, max_length=10_000)]
    # One bad element is enough to refuse: a million errors would take minutes and gigabytes.
    documents: Annotated[list[RequestDocument], FailFast(), Field(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    reference: ImageDocument | ContentDocument | str | None = None
    """an image that the query's text changes (composed retrieval)"""
    method: str | None = None
    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    return_pruning: bool = False
    """answer with tokens, FLOPs and KV bytes saved, seconds by part"""
    return_survivors: bool = False
    """and with the tokens alive after each stage"""


class Result(BaseModel):
    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class Usage(BaseModel):
    total_tokens: int


class RerankResponse(BaseModel):
    id: str
    model: str
    usage: Usage
    results: list[Result]
    meta: dict[str, Any]
    pruning: list[dict[str, Any]] | None = None


class Problem(BaseModel):
    code: str
    message: str


class ErrorResponse(BaseModel):
    error: Problem
    detail: str
    """the message once more, where clients of Jina look for it"""
