"""Rank images with the interface of a sentence-transformers CrossEncoder."""

from radical_rerank import generated_list
from radical_rerank.integrations.cross_encoder import ImageCrossEncoder

query, images = generated_list(7, candidates=6)
model = ImageCrossEncoder("scenes", keep=0.2)
for hit in model.rank(query, images, top_k=3):
    print(hit["corpus_id"], round(hit["score"], 3))
print(model.predict([(query, image) for image in images]).round(3))
