import pytest
import torch
import torch.nn.functional as F
from transformers import CLIPModel, CLIPTextModel, CLIPTokenizer

from lit_sd.metrics import ClipFeatures
from lit_sd.pretrain.contrastive import (
    ContrastiveModule,
    contrastive_losses,
    jitter,
    multi_positive,
    new_clip,
)
from lit_sd.pretrain.vocabulary import learn_vocabulary

CAPTIONS = ["red heart", "blue heart", "a photo of grass", "a photo of grass"]


@pytest.fixture(scope="module")
def clip():
    torch.manual_seed(0)
    tokenizer = learn_vocabulary(CAPTIONS, 600)
    return new_clip(tokenizer, size=16, patch=8, width=64, image_layers=1, text_layers=2, dim=8)


def test_with_one_positive_each_it_is_cross_entropy():
    logits = torch.randn(5, 5)
    torch.testing.assert_close(
        multi_positive(logits, torch.eye(5, dtype=torch.bool)),
        F.cross_entropy(logits, torch.arange(5), reduction="none"),
    )


def test_several_positives_and_none_by_hand():
    logits = torch.log(torch.tensor([[0.5, 0.25, 0.25], [0.2, 0.3, 0.5]]))
    positive = torch.tensor([[True, True, False], [False, False, False]])
    expected = torch.tensor([-(torch.log(torch.tensor(0.5)) + torch.log(torch.tensor(0.25))) / 2, 0.0])
    torch.testing.assert_close(multi_positive(logits, positive), expected)


def test_the_loss_between_pictures_leaves_each_picture_itself_out():
    images = F.normalize(torch.randn(4, 8), dim=1)
    same = torch.eye(4, dtype=torch.bool)
    same[2, 3] = same[3, 2] = True
    parts = contrastive_losses(images, images, torch.tensor(2.0), same)
    assert parts["image"][:2].tolist() == [0, 0]
    logits = 2 * images @ images.T
    expected = -(logits[2, 3] - torch.logsumexp(logits[2, [0, 1, 3]], 0))
    torch.testing.assert_close(parts["image"][2], expected)


def test_no_jitter_is_the_same_picture_and_some_keeps_white_white():
    pixels = torch.rand(3, 3, 16, 16) * 2 - 1
    torch.testing.assert_close(jitter(pixels, 0.0, torch.Generator()), pixels, atol=1e-5, rtol=0)
    white = torch.ones(2, 3, 16, 16)
    torch.testing.assert_close(jitter(white, 0.3, torch.Generator()), white)
    assert (jitter(pixels, 0.2, torch.Generator()) - pixels).abs().max() > 0.1


def test_export_is_what_transformers_and_pipelines_read(clip, tmp_path):
    task = ContrastiveModule(clip, torch.optim.AdamW, seed=0, image_weight=0.5, jitter=0.1)
    task.export(tmp_path)
    tokenizer = CLIPTokenizer.from_pretrained(tmp_path / "tokenizer")
    tokens = tokenizer(CAPTIONS, padding="max_length", truncation=True, return_tensors="pt")
    assert tokens.input_ids.shape == (4, 77)
    whole, tower = (
        CLIPModel.from_pretrained(tmp_path / "clip"),
        CLIPTextModel.from_pretrained(tmp_path / "text_encoder"),
    )
    with torch.no_grad():
        expected = whole.text_model(input_ids=tokens.input_ids).last_hidden_state
        torch.testing.assert_close(tower(input_ids=tokens.input_ids).last_hidden_state, expected)
        features = ClipFeatures.from_folder(tmp_path / "clip")
        pixels = torch.randint(0, 256, (4, 3, 16, 16), dtype=torch.uint8)
        images, texts = task.eval().embed(pixels / 127.5 - 1, CAPTIONS)
    torch.testing.assert_close(features(pixels), images, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(features.captions(CAPTIONS), texts, atol=1e-5, rtol=1e-4)


def test_weight_decay_spares_gains_and_biases(clip):
    task = ContrastiveModule(clip, torch.optim.AdamW, seed=0, image_weight=0.5, jitter=0.1)
    matrices, rest = task.parameter_groups()
    assert all(p.ndim > 1 for p in matrices["params"])
    assert rest["weight_decay"] == 0
    assert len(matrices["params"]) + len(rest["params"]) == len(list(task.parameters()))
