"""HunyuanVideo-1.5 text-to-video, from a folder in diffusers or Tencent layout."""
