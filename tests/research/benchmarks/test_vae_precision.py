"""The benchmark of the VAE's precision on clips of one frame: all rows are there, and finer precisions err less."""

import re
import warnings

import pytest

from research.benchmarks import vae_precision as script

SMALL = "--model {model} --frames 1 --size 8 8 --clip 1 8 8 --tiny 1 8 8 --output {output}"


@pytest.fixture(scope="module")
def page(tiny_folder, tmp_path_factory):
    output = tmp_path_factory.mktemp("page") / "page.md"
    with warnings.catch_warnings(action="ignore"):  # of oneDNN, on a processor without bf16
        script.main(SMALL.format(model=tiny_folder, output=output).split())
    return output.read_text()


@pytest.mark.parametrize("latents", ["random", "disc"])
def test_finer_precisions_err_less(page, latents):
    rows = re.findall(rf"^\| embedded, {latents} \| (\w+) \| (\S+) \| (\S+) \|", page, re.MULTILINE)
    assert [name for name, *_ in rows] == ["bf16", "fp16", "tf32", "fp32"]
    bf16, fp16, _, fp32 = (float(rms) for _, rms, _ in rows)
    assert fp32 < 0.01 * fp16 and fp16 < 0.3 * bf16 < 1


def test_rows_of_the_model_folder(page):
    errors = re.findall(r"^\| full size, real weights, (\w+) \| (\w+) \|", page, re.MULTILINE)
    assert errors == [
        (latents, name) for latents in ("random", "disc") for name in ("bf16", "fp16", "tf32")
    ]
    costs = re.findall(r"^\| 1 x 8 x 8 \| (\w+) \| [\d.]+ \| 0.0 \| (\w+) \|$", page, re.MULTILINE)
    assert costs == [("bf16", "True"), ("fp16", "True"), ("tf32", "True")]
