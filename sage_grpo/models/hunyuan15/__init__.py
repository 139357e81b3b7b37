"""HunyuanVideo-1.5 text-to-video, from a folder in diffusers or Tencent layout."""

DEFAULT_VERSION = "480p_t2v"  # subfolder of `transformer/` in Tencent's layout
