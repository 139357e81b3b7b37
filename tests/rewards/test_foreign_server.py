"""The server of docs/rewards.md that knows nothing of this project, run as it stands there."""

import re
import socket
import subprocess
import sys
import time

import pytest
import torch

from sage_grpo.environment import TOKEN_VARIABLE
from sage_grpo.rewards.client import RemoteError
from tests.launch.shell import ROOT
from tests.rewards.serving import TOKEN, remote_reward


@pytest.fixture
def address(tmp_path, monkeypatch):
    """Where the server listens: at a free port instead of the page's."""
    section = (
        (ROOT / "docs" / "rewards.md").read_text().partition("## A server in another framework")[2]
    )
    code = re.search(r"```python\n(.*?)```", section, re.DOTALL).group(1)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    program = tmp_path / "server.py"
    program.write_text(code.replace("8900", str(port)))
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN)
    # -S: nothing but the standard library
    server = subprocess.Popen([sys.executable, "-S", program], env={TOKEN_VARIABLE: TOKEN})
    while True:
        try:
            socket.create_connection(("127.0.0.1", port)).close()
            break
        except ConnectionRefusedError:
            assert server.poll() is None
            time.sleep(0.01)
    yield f"http://127.0.0.1:{port}"
    server.kill()
    server.wait()


def test_the_server_of_the_page_scores_clips(address):
    red, blue = (torch.zeros(5, 16, 24, 3, dtype=torch.uint8) for _ in range(2))
    red[..., 0] = 255
    blue[..., 2] = 51
    reward = remote_reward(address)
    assert reward.names == ("warmth",)
    reward.check(["a red circle"])
    scores = reward.score([red, blue[:3]], ["a red circle", "a blue square"], fps=8)
    assert scores["warmth"].tolist() == [1.0, -0.2]


def test_it_refuses_other_tokens(address, monkeypatch):
    monkeypatch.setenv(TOKEN_VARIABLE, TOKEN[::-1])
    with pytest.raises(RemoteError, match="wrong token"):
        remote_reward(address)
