"""Names of model versions that code refers to: values of `pretrained_transformer_version`. Imported without torch."""

# Selects how a model is sampled and, in Tencent's layout, a subfolder of `transformer/`.
DEFAULT_VERSION = "480p_t2v"

# Opens a folder that serves both tasks for image-to-video.
ANIMATE = "i2v"


def refused_for_one_transformer(flag: str, value: object) -> str:
    """Why a model with one transformer refuses a flag for those with two."""
    return (
        f"{flag} is {value}, but the model has one transformer for all noise levels: leave it out"
    )
