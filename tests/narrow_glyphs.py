"""Makes the tiny model of the tests 20 times smaller: a projection that diffusers fixes at 2048 channels gets 64.

Its square matrix is nine tenths of all weights: ranks send them to each other, and checkpoints and optimizers hold
several copies. The model of the demo, `assets/tiny`, and full-size ones keep their width.
"""

from diffusers.models.transformers import transformer_hunyuan_video15 as stock

GLYPH_DIM = 12  # by which the constructor knows the tests' model: others have 16 or 1472
WIDTH = 64

Projection = stock.HunyuanVideo15ByT5TextProjection


def projection(in_features: int, hidden_size: int, out_features: int) -> Projection:
    narrow = in_features == GLYPH_DIM
    return Projection(in_features, WIDTH if narrow else hidden_size, out_features)


stock.HunyuanVideo15ByT5TextProjection = projection
