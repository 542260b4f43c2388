"""lmms-eval from Python; else: lmms-eval --model radical --model_args keep=0.2 --tasks NAME."""

from lmms_eval.api.instance import Instance

from radical_rerank.integrations.lmms_eval import RadicalLmms
from radical_rerank.embedded.scenes.lists import make_list

picture = make_list("test", 7, 1).images[0]
model = RadicalLmms(method="radical", keep=0.2)
model.task_dict = {"ask": {"test": [{"picture": picture, "question": "which colour is the star ?"}]}}


def messages(doc: dict) -> list[dict]:
    shown, asked = {"type": "image", "url": doc["picture"]}, {"type": "text", "text": doc["question"]}
    return [{"role": "user", "content": [shown, asked]}]


request = Instance(
    request_type="generate_until", arguments=("", messages, {"max_new_tokens": 4}, 0, "ask", "test"), idx=0,
    metadata={"task": "ask", "doc_id": 0, "repeats": 1},
)  # fmt: skip
print(model.generate_until([request]))
