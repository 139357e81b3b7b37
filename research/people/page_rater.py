"""Rates a study through the labeling page's own HTTP interface, as the script in a browser does."""

import tempfile
from collections.abc import Callable
from pathlib import Path

import httpx2
from tqdm import tqdm


def rate(address: str, choose: Callable[[Path, Path], str], question: str) -> int:
    """Answer all pairs of the page at `address`; choose: left and right clip -> left, right, tie or bad.

    Returns the number of answers.
    """
    base, _, token = address.partition("/?token=")
    headers = {"Authorization": f"Bearer {token}"}
    with (
        httpx2.Client(base_url=base, headers=headers, timeout=60) as http,
        tempfile.TemporaryDirectory() as folder,
    ):
        left = Path(folder) / "left.mp4"
        right = Path(folder) / "right.mp4"
        state = http.post("/state", json={}).raise_for_status().json()
        given = 0
        with tqdm(total=state["total"], initial=state["done"], desc="rating", unit="pair") as bar:
            while "trial" in state:
                for file, number in zip((left, right), state["clips"], strict=True):
                    file.write_bytes(http.get(f"/clips/{number}").raise_for_status().content)
                answer = {"trial": state["trial"], "answers": {question: choose(left, right)}}
                state = http.post("/answer", json=answer).raise_for_status().json()
                given += 1
                bar.update()
    return given
