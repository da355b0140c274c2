"""Models train on the device as on the CPU, and nothing of that runs on the CPU."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional

STEPS = 4


class Mlp(nn.Module):
    """Layers with bias, GELU and dropout of probability 0."""

    def __init__(self):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(12, 32), nn.GELU(), nn.LayerNorm(32), nn.Dropout(0.0), nn.Linear(32, 5)
        )

    def forward(self, x):
        return self.layers(x)

    @staticmethod
    def batch():
        return torch.randn(8, 12), torch.randint(0, 5, (8,))


class ResNetBlock(nn.Module):
    """Convolutions with strides, batch normalisation, a shortcut, pooling."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.pool = nn.MaxPool2d(2)
        self.one = nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False)
        self.norm_one = nn.BatchNorm2d(16)
        self.two = nn.Conv2d(16, 16, 3, padding=1, bias=False)
        self.norm_two = nn.BatchNorm2d(16)
        self.shortcut = nn.Sequential(
            nn.Conv2d(8, 16, 1, stride=2, bias=False), nn.BatchNorm2d(16)
        )
        self.head = nn.Linear(16, 5)

    def forward(self, x):
        x = self.pool(functional.relu(self.stem(x)))
        y = functional.relu(self.norm_one(self.one(x)))
        y = functional.relu(self.norm_two(self.two(y)) + self.shortcut(x))
        return self.head(functional.adaptive_avg_pool2d(y, 1).flatten(1))

    @staticmethod
    def batch():
        return torch.randn(4, 3, 16, 16), torch.randint(0, 5, (4,))


class Llama(nn.Module):
    """Embedding, RMS normalisation, rotary positions, causal attention, SwiGLU."""

    def __init__(self, vocabulary=40, width=32, heads=4):
        super().__init__()
        self.heads = heads
        self.embedding = nn.Embedding(vocabulary, width)
        self.norm_one = nn.RMSNorm(width)
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.norm_two = nn.RMSNorm(width)
        self.gate = nn.Linear(width, 2 * width, bias=False)
        self.up = nn.Linear(width, 2 * width, bias=False)
        self.down = nn.Linear(2 * width, width, bias=False)
        self.norm = nn.RMSNorm(width)
        self.head = nn.Linear(width, vocabulary, bias=False)
        half = width // heads // 2
        frequencies = 1.0 / (10000 ** (torch.arange(half) / half))
        self.register_buffer("angles", torch.outer(torch.arange(64), frequencies))

    def rotate(self, x):
        angles = self.angles[: x.shape[-2]]
        cos, sin = angles.cos(), angles.sin()
        one, two = x.chunk(2, -1)
        return torch.cat((one * cos - two * sin, two * cos + one * sin), -1)

    def forward(self, tokens):
        x = self.embedding(tokens)
        batch, length, width = x.shape
        q, k, v = (
            part.view(batch, length, self.heads, -1).transpose(1, 2)
            for part in self.qkv(self.norm_one(x)).chunk(3, -1)
        )
        y = functional.scaled_dot_product_attention(
            self.rotate(q), self.rotate(k), v, is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, length, width))
        y = self.norm_two(x)
        x = x + self.down(functional.silu(self.gate(y)) * self.up(y))
        return self.head(self.norm(x)).flatten(0, 1)

    @staticmethod
    def batch():
        return torch.randint(0, 40, (2, 16)), torch.randint(0, 40, (32,))


class Gpt(nn.Module):
    """torch's own encoder layer, with a mask."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(40, 32)
        self.positions = nn.Embedding(16, 32)
        self.layer = nn.TransformerEncoderLayer(
            32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True
        )
        self.head = nn.Linear(32, 40)

    def forward(self, tokens):
        length = tokens.shape[1]
        mask = nn.Transformer.generate_square_subsequent_mask(length, device=tokens.device)
        x = self.tokens(tokens) + self.positions(torch.arange(length, device=tokens.device))
        return self.head(self.layer(x, src_mask=mask, is_causal=True)).flatten(0, 1)

    batch = Llama.batch


OPTIMIZERS = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.01),
    "adamw, one by one": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
}


def train(model, optimizer, batches, device, clip=False, amp=False):
    """The losses of a few steps."""
    model = copy.deepcopy(model).to(device)
    optimizer = optimizer(model.parameters())
    losses = []
    for inputs, targets in batches:
        inputs, targets = inputs.to(device), targets.to(device)
        with torch.autocast(device, dtype=torch.bfloat16, enabled=amp):
            loss = functional.cross_entropy(model(inputs), targets)
        optimizer.zero_grad()
        loss.backward()
        if clip:
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        losses.append(loss.item())
    return losses, model.cpu().state_dict()


@pytest.fixture
def _nothing_falls_back():
    torch.tpu.reset_fallback_stats()
    yield
    assert torch.tpu.fallback_stats() == {}


@pytest.mark.usefixtures("_nothing_falls_back")
@pytest.mark.parametrize("optimizer", OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("kind", [Mlp, ResNetBlock, Llama, Gpt])
def test_trains_as_on_the_cpu(kind, optimizer):
    model = kind()
    batches = [kind.batch() for _ in range(STEPS)]
    losses, state = train(model, optimizer, batches, "tpu", clip=True)
    expected, expected_state = train(model, optimizer, batches, "cpu", clip=True)
    torch.testing.assert_close(losses, expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(state, expected_state, rtol=1e-2, atol=2e-3)


@pytest.mark.usefixtures("_nothing_falls_back")
def test_trains_in_mixed_precision():
    model = Llama()
    batches = [Llama.batch()] * 8
    losses, _ = train(model, OPTIMIZERS["adamw"], batches, "tpu", amp=True)
    expected, _ = train(model, OPTIMIZERS["adamw"], batches, "cpu")
    assert losses[-1] < losses[0]
    torch.testing.assert_close(losses, expected, rtol=3e-2, atol=3e-2)
