"""Names of model versions that code refers to."""

DEFAULT_VERSION = (
    "480p_t2v"  # how a model is sampled; in Tencent's layout a subfolder of `transformer/`
)
ANIMATE = "i2v"  # version that opens a folder for both tasks as one for image to video
