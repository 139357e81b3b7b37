"""Names of model versions that code refers to: values of `pretrained_transformer_version`."""

# Selects how a model is sampled and, in Tencent's layout, a subfolder of `transformer/`.
DEFAULT_VERSION = "480p_t2v"

# Opens a folder that serves both tasks for image-to-video.
ANIMATE = "i2v"
