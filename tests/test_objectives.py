"""Objectives against diffusers' schedulers and figures worked out by hand."""

import pytest
import torch
from diffusers import DDPMScheduler

from lit_sd.objectives import (
    NoiseSchedule,
    Objective,
    add_noise,
    masked_mean,
    min_snr,
    min_snr_weighting,
    target_of,
    uniform,
)

PREDICTIONS = ["epsilon", "v_prediction", "sample"]


def scheduler(prediction="epsilon", **options):
    return DDPMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        prediction_type=prediction,
        **options,
    )


@pytest.fixture
def draws():
    g = torch.Generator().manual_seed(3)
    shape = (5, 4, 6, 7)
    t = torch.tensor([0, 1, 400, 998, 999])
    return torch.randn(shape, generator=g), torch.randn(shape, generator=g), t


def test_noisy_latents_and_velocity_are_diffusers_own(draws):
    x0, eps, t = draws
    peer = scheduler()
    schedule = NoiseSchedule.from_scheduler(peer)
    torch.testing.assert_close(add_noise(schedule, x0, eps, t), peer.add_noise(x0, eps, t))
    torch.testing.assert_close(target_of(schedule, x0, eps, t, "v_prediction"), peer.get_velocity(x0, eps, t))


@pytest.mark.parametrize("prediction", PREDICTIONS)
@pytest.mark.parametrize("weighting", [uniform, min_snr_weighting(5.0)])
@pytest.mark.parametrize("zero_snr", [False, True])
def test_an_oracle_has_loss_zero_and_any_error_a_finite_one(draws, prediction, weighting, zero_snr):
    x0, eps, t = draws
    schedule = NoiseSchedule.from_scheduler(scheduler(prediction, rescale_betas_zero_snr=zero_snr))
    objective = Objective(weighting=weighting)
    oracle = objective(schedule, lambda xt, t: target_of(schedule, x0, eps, t, prediction), x0, eps, t)
    assert oracle.tolist() == [0.0] * 5
    wrong = objective(schedule, lambda xt, t: torch.zeros_like(xt), x0, eps, t)
    assert wrong.isfinite().all()
    assert (wrong >= 0).all()


def test_the_loss_of_a_sample_is_its_own_mean_square(draws):
    x0, eps, t = draws
    schedule = NoiseSchedule.from_scheduler(scheduler("epsilon"))
    losses = Objective()(
        schedule, lambda xt, t: eps + torch.tensor([0.0, 1, 2, 3, 4]).view(5, 1, 1, 1), x0, eps, t
    )
    torch.testing.assert_close(losses, torch.tensor([0.0, 1, 4, 9, 16]))


@pytest.mark.parametrize(
    ("prediction", "weights"),
    [("sample", [0.25, 5.0, 5.0]), ("v_prediction", [0.2, 5 / 6, 5 / 21]), ("epsilon", [1.0, 1.0, 0.25])],
)
def test_min_snr_by_hand_at_three_levels(prediction, weights):
    snr = torch.tensor([0.25, 5.0, 20.0], dtype=torch.float64)
    torch.testing.assert_close(
        min_snr(snr, prediction, gamma=5.0), torch.tensor(weights, dtype=torch.float64)
    )


@pytest.mark.parametrize("prediction", PREDICTIONS)
def test_min_snr_weights_the_same_error_in_x0_alike(prediction):
    """The three forms are one: weight x (error of the prediction) is min(snr, 5) x (error of x0) for each."""
    schedule = NoiseSchedule.from_scheduler(scheduler())
    t = torch.tensor([10, 300, 700])
    x0, eps = torch.randn(3, 4, 8, 8).double(), torch.randn(3, 4, 8, 8).double()
    wrong_x0 = x0 + 0.1 * torch.randn_like(x0)
    abar = schedule.abar[t].view(3, 1, 1, 1)
    xt = abar.sqrt() * x0 + (1 - abar).sqrt() * eps
    implied_eps = (xt - abar.sqrt() * wrong_x0) / (1 - abar).sqrt()
    wrong = {
        "sample": wrong_x0,
        "epsilon": implied_eps,
        "v_prediction": abar.sqrt() * implied_eps - (1 - abar).sqrt() * wrong_x0,
    }
    right = target_of(schedule, x0, eps, t, prediction)
    error = (wrong[prediction] - right).square().flatten(1).mean(1)
    expected = schedule.snr(t).clamp(max=5) * (wrong_x0 - x0).square().flatten(1).mean(1)
    torch.testing.assert_close(min_snr(schedule.snr(t), prediction, gamma=5.0) * error, expected)


def test_weights_are_built_after_zero_terminal_snr_rescaling():
    schedule = NoiseSchedule.from_scheduler(scheduler("v_prediction", rescale_betas_zero_snr=True))
    snr = schedule.snr(torch.tensor([999]))
    assert snr.item() == pytest.approx(0, abs=1e-6)
    assert min_snr(snr, "v_prediction", gamma=5.0).item() == pytest.approx(0, abs=1e-6)
    assert min_snr(torch.zeros(1), "epsilon", gamma=5.0).item() == 1.0


def test_an_override_wins_over_the_models_prediction(draws):
    x0, eps, t = draws
    schedule = NoiseSchedule.from_scheduler(scheduler("epsilon"))
    losses = Objective(prediction="sample")(schedule, lambda xt, t: x0, x0, eps, t)
    assert losses.tolist() == [0.0] * 5


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="must be positive, got 0"):
        min_snr_weighting(0)
    with pytest.raises(ValueError, match="predicts 'flow_prediction'"):
        NoiseSchedule.from_scheduler(
            DDPMScheduler.from_config(scheduler().config, prediction_type="flow_prediction")
        )


def test_half_precision_latents_keep_their_type(draws):
    x0, eps, t = draws
    schedule = NoiseSchedule.from_scheduler(scheduler())
    assert add_noise(schedule, x0.bfloat16(), eps.bfloat16(), t).dtype == torch.bfloat16
    losses = Objective()(schedule, lambda xt, t: xt, x0.bfloat16(), eps.bfloat16(), t)
    assert losses.dtype == torch.float32


def test_a_mask_makes_a_weighted_mean_over_each_latents_area():
    """Errors 1 2 / 3 4 in two channels. Of 4x4 pixels the left half counts, and the lower right quarter by
    half: weights 1 0 / 1 0.5, so (1 + 3 + 0.5 * 4) / 2.5.
    """
    error = torch.tensor([[1.0, 2.0], [3.0, 4.0]]).expand(2, 2, 2, 2)
    mask = torch.zeros(2, 1, 4, 4)
    mask[0, :, :, :2] = 1
    mask[0, :, 2:, 2:] = 0.5
    assert masked_mean(error, mask).tolist() == [pytest.approx(6 / 2.5), 0.0]
    assert masked_mean(error, torch.ones(2, 1, 4, 4)).tolist() == [2.5, 2.5]
    assert masked_mean(error, None).tolist() == [2.5, 2.5]
