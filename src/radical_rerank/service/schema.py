"""Requests and responses in the forms of Jina, Cohere and vLLM, with our extensions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, FailFast, Field
from typing_extensions import TypeAliasType

MAX_QUERY = 10_000
"""characters of a query, and of an instruction"""


class ImageUrl(BaseModel):
    """The URL of an image, or a data URI."""

    url: str


class ImagePart(BaseModel):
    """vLLM's form of an image: {"type": "image_url", "image_url": {"url": "data:…"}}."""

    type: Literal["image_url"]
    image_url: ImageUrl


class TextPart(BaseModel):
    """vLLM's form of a text: {"type": "text", "text": "…"}."""

    type: Literal["text"]
    text: str


Part = Annotated[ImagePart | TextPart, Field(discriminator="type")]
# Validation stops at the first bad element: a million errors would take minutes and gigabytes.
Content = TypeAliasType("Content", Annotated[list[Part], FailFast(), Field(min_length=1)])
Images = TypeAliasType("Images", Annotated[list[str], FailFast()])


class MixedDocument(BaseModel):
    """Images and a text: {"text", "image", "images"}, as Jina has them, or vLLM's {"content"}.

    An image is a data URI, base64 or an allowed URL. {"pdf"} is an extension: a PDF file as a data URI or
    base64, whose pages are ranked one by one.
    """

    text: str | None = None
    image: str | None = None
    images: Images | None = None
    content: str | Content | None = None
    pdf: str | None = None


RequestDocument = MixedDocument | str
"""a document in any form; a plain string is Cohere's: a text, or an image as a data URI, base64 or URL"""


class RerankRequest(BaseModel):
    """A query and the documents to rank: images, texts, or both.

    Unknown fields are ignored, since clients of other services send their own. `instruction`, `reference`,
    `method`, `keep`, `return_pruning` and `return_survivors` are extensions.
    """

    query: Annotated[str, Field(min_length=1, max_length=MAX_QUERY)] | MixedDocument
    """words, or images and words"""
    documents: Annotated[list[RequestDocument], FailFast(), Field(min_length=1)]
    model: str | None = None
    top_n: Annotated[int, Field(ge=1)] | None = None
    return_documents: bool = False
    instruction: Annotated[str, Field(max_length=MAX_QUERY)] | None = None
    """what to look for, for models that are told so"""
    reference: RequestDocument | None = None
    """an image that the query's text changes (composed retrieval)"""
    method: str | None = None
    keep: Annotated[float, Field(gt=0, le=1)] | None = None
    return_pruning: bool = False
    """return tokens, FLOPs and KV bytes saved, and seconds by part"""
    return_survivors: bool = False
    """return the same, and the tokens alive after each stage"""


class Result(BaseModel):
    """One document of the ranking, or one page of it.

    index: the document's place in the request
    page: its number, from 1, if the document is a PDF
    """

    index: int
    relevance_score: float
    page: int | None = None
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
