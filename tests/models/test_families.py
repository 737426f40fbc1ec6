import pytest

from lit_sd.models.families import recognise

VAE = {"latent_channels": 4}
XL = {"addition_embed_type": "text_time", "in_channels": 4}


@pytest.mark.parametrize(
    ("unet", "encoders", "family"),
    [
        ({"in_channels": 4}, {"text_encoder"}, "sd15"),
        ({"in_channels": 4, "use_linear_projection": True}, {"text_encoder"}, "sd21"),
        (XL, {"text_encoder", "text_encoder_2"}, "sdxl"),
        (XL, {"text_encoder_2"}, "sdxl_refiner"),
    ],
)
def test_families_are_told_from_their_parts(unet, encoders, family):
    assert recognise(unet, VAE, encoders) == family


@pytest.mark.parametrize("channels", [5, 7, 8, 9])
def test_networks_with_another_input_are_refused(channels):
    with pytest.raises(ValueError, match=f"takes {channels} channels.*inpainting"):
        recognise({"in_channels": channels}, VAE, {"text_encoder"})


@pytest.mark.parametrize(
    ("unet", "encoders"), [(XL, {"text_encoder"}), ({}, {"text_encoder_2"}), ({}, set())]
)
def test_missing_text_encoders_are_named(unet, encoders):
    with pytest.raises(ValueError, match="needs text_encoder"):
        recognise(unet, VAE, encoders)
