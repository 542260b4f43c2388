"""A model for lmms-eval: single-image benchmarks with any pruning method, `lmms-eval --model radical`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from radical_rerank.backbones import DEFAULT_MODEL, Backbone, ImageFeatures, layout_of
from radical_rerank.errors import InputError, needs_extra
from radical_rerank.pruning import build
from radical_rerank.reranking.calibration import profile_of
from radical_rerank.reranking.encoding import load_image

with needs_extra("lmms-eval"):
    from lmms_eval.api.instance import Instance
    from lmms_eval.api.model import lmms
    from lmms_eval.protocol import ChatMessages

MAX_SINGLE_IMAGE_TOKENS = 1280
"""a question about one image gets more visual tokens than each image of a list"""


class RadicalLmms(lmms):  # type: ignore[misc, unused-ignore]
    """Answers questions about images. With a single image, RaDiCal selects tokens by relevance alone.

    Args:
        pretrained: a model id or a folder
        method: the name of a pruning method
        keep: the fraction of visual tokens alive at the end
        max_image_tokens: larger images are scaled down to this many visual tokens
        device: for loading the model
        batch_size: ignored
        backbone: use this model instead of loading one
        options: options of the method

    Example:
        $ lmms-eval --model radical --model_args pretrained=Qwen/Qwen3-VL-4B-Instruct,keep=0.2 --tasks mme
    """

    is_simple = False

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        method: str = "radical",
        keep: float = 0.2,
        max_image_tokens: int = MAX_SINGLE_IMAGE_TOKENS,
        device: str | None = None,
        batch_size: int | str = 1,
        backbone: Backbone | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.backbone = backbone or Backbone.from_pretrained(pretrained, device=device)
        self.max_image_tokens = int(max_image_tokens)
        self.pruner = build(method, keep=float(keep), **options)
        if self.pruner.needs_profile:
            self.pruner = self.pruner.with_profile(profile_of(self.backbone))

    def generate_until(self, requests: list[Instance]) -> list[str]:
        """Return the model's answer to each request."""
        answers = []
        for request in requests:
            _, doc_to_messages, options, doc_id, task, split = request.args
            messages = ChatMessages(messages=doc_to_messages(self.task_dict[task][split][doc_id]))
            answer = self._answer(messages, int(options.get("max_new_tokens", 128)))
            for stop in options.get("until") or []:
                answer = answer.split(stop)[0] if stop else answer
            answers.append(answer)
        return answers

    def _answer(self, messages: ChatMessages, max_new_tokens: int) -> str:
        backbone = self.backbone
        documents, videos, sounds = messages.extract_media()
        if videos or sounds:
            raise InputError("only images are supported, not video or audio")
        images = [load_image(document, name=f"image {i}") for i, document in enumerate(documents)]
        features = backbone.encode([backbone.preprocess(image, self.max_image_tokens) for image in images])
        ids = backbone.tokenizer(self._prompt(messages, features), add_special_tokens=False)["input_ids"]
        inputs = backbone.inputs([ids], features)
        if not images:
            return backbone.write(inputs, max_new_tokens)[0]
        layout = layout_of(backbone.model, torch.tensor(ids), image_sizes=[f.grid for f in features])
        pruner = self.pruner.for_single_image() if len(images) == 1 else self.pruner
        with pruner.on(backbone.model, layout):
            return backbone.write(inputs, max_new_tokens)[0]

    def _prompt(self, messages: ChatMessages, features: Sequence[ImageFeatures]) -> str:
        """Return the text of a conversation, with one image token per visual token."""
        tokenizer, (start, end) = self.backbone.tokenizer, self.backbone.family.markup
        mark = tokenizer.convert_ids_to_tokens(self.backbone.image_token_id)
        images = iter(f"{start}{feature.text(mark)}{end}" for feature in features)
        turns = [
            {
                "role": message.role,
                "content": "".join(
                    next(images) if part.type == "image" else part.text for part in message.content
                ),
            }
            for message in messages.messages
        ]
        if tokenizer.chat_template is None:  # the embedded model has no chat format
            return " ".join(turn["content"] for turn in turns)
        return str(tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True))

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        """Raise an InputError: log-likelihoods are not supported."""
        raise InputError("log-likelihood tasks are not supported; choose a generation task")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        """Raise an InputError: conversations of several rounds are not supported."""
        raise InputError("multi-round tasks are not supported")
