"""The layout of a prompt that was not built by this package."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor

from radical_rerank.backbones.model import family_of
from radical_rerank.errors import LayoutError
from radical_rerank.pruning import Layout


def layout_of(
    model: Any,
    input_ids: Tensor | Sequence[int],
    *,
    query: Sequence[int] | None = None,
    protected: Sequence[int] = (),
    image_sizes: Sequence[Sequence[int]] | None = None,
) -> Layout:
    """Describe one prompt for use with a stock model: each run of image tokens is an image.

    Row breaks and the text between tiles are markup inside an image.

    Args:
        model: a supported Hugging Face model
        input_ids: (S,) token ids without padding
        query: positions of the query's words; by default all text after the last candidate image
        protected: numbers of the images that are context, not candidates
        image_sizes: (height, width) of each image, as the processor gives them; only LLaVA needs them

    Returns:
        The layout to pass to `Pruner.on`.

    Example:
        >>> backbone = Backbone.from_pretrained("scenes")
        >>> image = backbone.image_token_id
        >>> layout_of(backbone.model, [7, image, image, 8, image, image, 9, 9]).candidates
        (range(1, 3), range(4, 6))
    """
    family = family_of(model.config)
    ids = input_ids.tolist() if isinstance(input_ids, Tensor) else list(input_ids)
    if ids and not isinstance(ids[0], int):
        raise LayoutError("layout_of describes one prompt: pass input_ids[row] without padding")
    found = family.images_in(ids, [] if image_sizes is None else [tuple(size) for size in image_sizes])
    images = [span for span, _ in found]
    markup = tuple(mark for _, marks in found for mark in marks)
    if not all(0 <= i < len(images) for i in protected):
        raise LayoutError(f"there are {len(images)} images, but {list(protected)} are to be protected")
    candidates = tuple(span for i, span in enumerate(images) if i not in protected)
    if not candidates:
        raise LayoutError("the prompt has no candidate image")
    context = tuple(images[i] for i in protected)
    taken = set[int]().union(*context)
    if query is None:
        query = [p for p in range(candidates[-1].stop, len(ids)) if p not in taken]
    return Layout(len(ids), candidates, tuple(query), context, markup=markup)
