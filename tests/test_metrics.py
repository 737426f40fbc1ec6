import numpy as np
import pytest
import torch
from PIL import Image
from scipy import linalg
from torch import nn

from lit_sd.metrics import frechet_distance, mean_cosine, recall_at, to_uint8


class Pixels(nn.Module):
    """The first pixel's three channels as features."""

    num_features, size = 3, 4

    def __init__(self):
        super().__init__()
        self.register_buffer("channels", torch.arange(3))  # an index, as CLIP's position ids

    def forward(self, pictures):
        return pictures[:, self.channels, 0, 0].float() / 255


def pictures(values):
    return torch.tensor(values, dtype=torch.uint8).view(-1, 3, 1, 1).expand(-1, 3, 4, 4).contiguous()


def test_frechet_distance_against_its_formula():
    rng = np.random.default_rng(0)
    real, drawn = rng.integers(0, 200, (500, 3)), rng.integers(40, 256, (400, 3))
    a, b = real / 255, drawn / 255
    covariance = linalg.sqrtm(np.cov(a.T) @ np.cov(b.T)).real
    expected = ((a.mean(0) - b.mean(0)) ** 2).sum() + np.trace(np.cov(a.T) + np.cov(b.T) - 2 * covariance)
    found = frechet_distance(Pixels(), [pictures(real[:300]), pictures(real[300:])], [pictures(drawn)])
    assert found == pytest.approx(expected, rel=1e-4)


def test_a_set_has_no_distance_from_itself():
    values = np.random.default_rng(1).integers(0, 256, (100, 3))
    assert frechet_distance(Pixels(), [pictures(values)], [pictures(values)]) == pytest.approx(0, abs=1e-6)


def test_recall_by_hand_and_ties_count_against_it():
    similarity = torch.tensor([[0.9, 0.1, 0.5], [0.8, 0.2, 0.7], [0.3, 0.3, 0.3]])
    assert recall_at(similarity, 1) == pytest.approx(1 / 3)
    assert recall_at(similarity, 3) == pytest.approx(1.0)
    assert recall_at(torch.zeros(200, 200), 10) == 0


def test_mean_cosine_of_all_pairs():
    a = torch.tensor([[1.0, 0], [0, 1]])
    b = torch.tensor([[0.6, 0.8]])
    assert mean_cosine(a, b) == pytest.approx(0.7)
    with pytest.raises(ValueError, match="at least one of each"):
        mean_cosine(a, torch.empty(0, 2))


def test_pictures_of_any_mode_become_three_channels():
    batch = to_uint8([Image.new("L", (2, 3), 7), Image.new("RGB", (2, 3), (7, 7, 7))])
    assert batch.shape == (2, 3, 3, 2)
    assert batch.unique().tolist() == [7]
