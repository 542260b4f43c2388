"""Requests and responses in the forms of Jina, Cohere and vLLM, with our extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field


class ImageUrl(BaseModel):
    """The URL of an image, or a data URI."""

    url: str


class ImagePart(BaseModel):
    """vLLM's form of an image: {"type": "image_url", "image_url": {"url": "data:…"}}."""

    type: Literal["image_url"]
    image_url: ImageUrl


class ContentDocument(BaseModel):
    """vLLM's form of a document: a content of exactly one image."""

    content: Annotated[list[ImagePart], FailFast(), Field(min_length=1, max_length=1)]


class ImageDocument(BaseModel):
    """Jina's form of a document: {"image": data URI, base64 or allowed URL}."""

    image: str


RequestDocument = ImageDocument | ContentDocument | str
"""an image in any form; a plain string is Cohere's"""


class RerankRequest(BaseModel):
    """A query and the images to rank.

    Unknown fields are ignored, since clients of other services send their own. `reference`, `method`, `keep`,
    `return_pruning` and `return_survivors` are extensions.
    """

    query: Annotated[str, Field(min_length=1, max_length=10_000)]
    # Validation stops at the first bad element: a million errors would take minutes and gigabytes.
    documents: Annotated[list[RequestDocument], FailFast(), Field(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    reference: RequestDocument | None = None
    """an image that the query's text changes (composed retrieval)"""
    method: str | None = None
    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    return_pruning: bool = False
    """return tokens, FLOPs and KV bytes saved, and seconds by part"""
    return_survivors: bool = False
    """return the same, and the tokens alive after each stage"""


class Result(BaseModel):
    """One document of the ranking. index: its place in the request"""

    index: int
    relevance_score: float
    document: dict[str, Any] | None = None


class Usage(BaseModel):
    """The tokens of all prompts together."""

    total_tokens: int


class RerankResponse(BaseModel):
    """The ranking, best first."""

    id: str
    model: str
    usage: Usage
    results: list[Result]
    meta: dict[str, Any]
    pruning: list[dict[str, Any]] | None = None


class Problem(BaseModel):
    """An error: a code for programs, a message for people."""

    code: str
    message: str


class ErrorResponse(BaseModel):
    """A response other than 200. detail: the message again, where Jina's clients look for it"""

    error: Problem
    detail: str
