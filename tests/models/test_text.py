"""Text encoders of any folder: the fingerprint of their files."""

from sage_grpo.models.text import file_fingerprint


def test_fingerprint_of_a_large_file_samples_it_evenly(tmp_path):
    path = tmp_path / "weights"
    content = bytearray(range(256)) * 4

    def fingerprint(position=None, extra=b""):
        changed = bytearray(content)
        if position is not None:
            changed[position] ^= 1
        path.write_bytes(changed + extra)
        return file_fingerprint(path, blocks=4, block_size=16)

    original = fingerprint()
    assert original == fingerprint()
    assert all(fingerprint(position) != original for position in (0, 256, 512 + 15, 768))
    assert fingerprint(extra=b"x") != original
