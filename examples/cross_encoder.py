"""Where a sentence-transformers CrossEncoder would rank texts: rank and predict, for pictures."""

from radical_rerank.integrations.cross_encoder import ImageCrossEncoder
from radical_rerank.embedded.scenes.lists import make_list

sample = make_list("test", 7, 6)  # six generated scenes; the first sentence describes one of them
query = sample.descriptions[0].text()
model = ImageCrossEncoder(keep=0.2)
for hit in model.rank(query, sample.images, top_k=3):
    print(hit["corpus_id"], round(hit["score"], 3))
print(model.predict([(query, image) for image in sample.images]).round(3))
