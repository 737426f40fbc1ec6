"""The tests check shapes and types of every call into the package; here they are seen to do so."""

import pytest
import torch
from jaxtyping import TypeCheckError

from lit_sd.generate import to_pictures
from lit_sd.objectives import min_snr_weighting


def test_a_wrong_shape_is_caught():
    with pytest.raises(TypeCheckError, match="b 3 h w"):
        to_pictures(torch.zeros(1, 4, 2, 2))


def test_whole_numbers_may_stand_for_floats():
    assert min_snr_weighting(5) is not None
