"""Extract VideoReward's prompt template from its published source file.

    python scripts/prompt_template.py prompt_template.py ckpts/VideoReward/prompt_template.txt

The text is part of the trained reward model: changing a single space changes the scores. It is therefore written byte
for byte, and only if it is the one the model was trained with. The source is parsed, never executed; it may also be the
text itself. Exit code 1: the source does not hold that text, or a file cannot be used.
"""

import ast
import hashlib
import sys
from pathlib import Path

CONSTANT = "DETAILED_PROMPT_WITH_SPECIAL_TOKEN"
SHA256 = "fdb6309bac618dd0c8b1b589d3a0970a974f7856eecbb355a190b2dce54af700"


def main(source: Path, target: Path) -> int:
    content = source.read_bytes()
    if sha256_of(content) != SHA256:  # it is not the text itself, but perhaps its source
        try:
            content = constant(content.decode(), CONSTANT).encode()
        except (SyntaxError, ValueError) as error:
            print(
                f"{source} is not the source of the prompt template ({error}); nothing was written.",
                file=sys.stderr,
            )
            return 1
    sha256 = sha256_of(content)
    if sha256 != SHA256:
        print(
            f"{source}: {CONSTANT} has sha256 {sha256} instead of {SHA256}; nothing was written.",
            file=sys.stderr,
        )
        return 1
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_bytes(content)
    return 0


def sha256_of(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def constant(source: str, name: str) -> str:
    """The string value that a module assigns to `name`."""
    for node in ast.parse(source).body:
        if not isinstance(node, ast.Assign):
            continue
        names = [target.id for target in node.targets if isinstance(target, ast.Name)]
        if name in names:
            value = ast.literal_eval(node.value)
            if isinstance(value, str):
                return value
    raise ValueError(f"{name} is not assigned in this source.")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("give two paths: prompt_template.py SOURCE TARGET")
    try:  # this program runs before anything is installed
        sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
    except OSError as error:
        sys.exit(f"prompt_template.py: {error.filename}: {error.strerror}")
