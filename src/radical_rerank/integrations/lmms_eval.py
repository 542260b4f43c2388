"""An lmms-eval model: single-image benchmarks under any method, `lmms-eval --model radical`."""

from __future__ import annotations

from typing import Any

import torch
from lmms_eval.api.instance import Instance
from lmms_eval.api.model import lmms
from lmms_eval.protocol import ChatMessages

from radical_rerank.backbones import DEFAULT_MODEL, Backbone, layout_of
from radical_rerank.errors import InputError
from radical_rerank.pruning import build
from radical_rerank.reranking.calibration import profile_of
from radical_rerank.reranking.encoding import load_image


class RadicalLmms(lmms):
    """A single image has no other candidates to differ from: RaDiCal then goes by relevance alone."""

    is_simple = False

    def __init__(
        self,
        pretrained: str = DEFAULT_MODEL,
        method: str = "radical",
        keep: float = 0.2,
        max_image_tokens: int = 1280,
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
        backbone, (start, end) = self.backbone, self.backbone.family.markup
        documents, videos, sounds = messages.extract_media()
        if videos or sounds:
            raise InputError("only images are supported, not video or audio")
        images = [load_image(found, name=f"image {i}") for i, found in enumerate(documents)]
        features = backbone.encode([backbone.preprocess(image, self.max_image_tokens) for image in images])
        mark = backbone.tokenizer.convert_ids_to_tokens(backbone.image_token_id)
        shown = iter(f"{start}{mark * len(feature.tokens)}{end}" for feature in features)
        turns = [
            {
                "role": message.role,
                "content": "".join(
                    next(shown) if part.type == "image" else part.text for part in message.content
                ),
            }
            for message in messages.messages
        ]
        if backbone.tokenizer.chat_template is None:  # the embedded model knows no turns
            text = " ".join(turn["content"] for turn in turns)
        else:
            text = backbone.tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        ids = backbone.tokenizer(text, add_special_tokens=False)["input_ids"]
        inputs = backbone.inputs([ids], features)
        if not images:
            return backbone.write(inputs, max_new_tokens)[0]
        layout = layout_of(backbone.model, torch.tensor(ids))
        pruner = self.pruner.for_single_image() if len(images) == 1 else self.pruner
        with pruner.on(backbone.model, layout):
            return backbone.write(inputs, max_new_tokens)[0]

    def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
        raise InputError("tasks of log-likelihoods are not supported; choose one that generates")

    def generate_until_multi_round(self, requests: list[Instance]) -> list[str]:
        raise InputError("tasks of several rounds are not supported")
