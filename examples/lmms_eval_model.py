"""lmms-eval from Python. From a shell: lmms-eval --model radical --model_args keep=0.2 --tasks NAME."""

from typing import Any

from lmms_eval.api.instance import Instance

from radical_rerank import generated_list
from radical_rerank.integrations.lmms_eval import RadicalLmms

_, (image,) = generated_list(7, candidates=1)
model = RadicalLmms(method="radical", keep=0.2)
model.task_dict = {"ask": {"test": [{"image": image, "question": "which colour is the star ?"}]}}


def messages(doc: dict[str, Any]) -> list[dict[str, Any]]:
    content = [{"type": "image", "url": doc["image"]}, {"type": "text", "text": doc["question"]}]
    return [{"role": "user", "content": content}]


request = Instance(
    request_type="generate_until",
    arguments=("", messages, {"max_new_tokens": 4}, 0, "ask", "test"),
    idx=0,
    metadata={"task": "ask", "doc_id": 0, "repeats": 1},
)
print(model.generate_until([request]))
