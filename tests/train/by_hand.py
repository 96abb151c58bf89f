"""The networks as a program with torch alone writes them, without anything of this project."""

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


class Bottleneck(nn.Module):
    def __init__(self, channels: int, inner: int, stride: int) -> None:
        super().__init__()
        outputs = 4 * inner
        self.conv1, self.bn1 = nn.Conv2d(channels, inner, 1, bias=False), nn.BatchNorm2d(inner)
        self.conv2 = nn.Conv2d(inner, inner, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(inner)
        self.conv3, self.bn3 = nn.Conv2d(inner, outputs, 1, bias=False), nn.BatchNorm2d(outputs)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride != 1 or channels != outputs:
            conv = nn.Conv2d(channels, outputs, 1, stride, bias=False)
            self.downsample = nn.Sequential(conv, nn.BatchNorm2d(outputs))

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.relu(self.bn2(self.conv2(out)))
        out = self.bn3(self.conv3(out))
        out += x if self.downsample is None else self.downsample(x)
        return self.relu(out)


class ResNet50(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        stem = [nn.Conv2d(3, 64, 7, 2, 3, bias=False), nn.BatchNorm2d(64), nn.ReLU(inplace=True)]
        blocks, channels = [], 64
        for inner, count in ((64, 3), (128, 4), (256, 6), (512, 3)):
            for number in range(count):
                blocks.append(Bottleneck(channels, inner, 2 if inner > 64 and number == 0 else 1))
                channels = 4 * inner
        self.body = nn.Sequential(*stem, nn.MaxPool2d(3, 2, 1), *blocks, nn.AdaptiveAvgPool2d(1))
        self.fc = nn.Linear(channels, 1000)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(torch.flatten(self.body(x), 1))


class Norm(nn.LayerNorm):
    def forward(self, x: Tensor) -> Tensor:
        """Compute in fp32, as autocast does on CUDA (not on a CPU); matrix products convert the result."""
        if x.dtype == self.weight.dtype:
            return super().forward(x)
        return functional.layer_norm(x.float(), self.normalized_shape, self.weight, self.bias)


class GptLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.ln1, self.ln2 = Norm(width), Norm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.fc, self.out = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.qkv(self.ln1(x)).split(c, -1)
        )
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        return x + self.out(functional.gelu(self.fc(self.ln2(x))))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, time: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(GptLayer(width, heads) for _ in range(layers))
        self.norm = Norm(width)
        self.register_buffer("positions", torch.randn(time, width), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        if torch.is_autocast_enabled("cpu"):
            x = x.bfloat16()
        x = x + self.positions.to(x.dtype)
        for layer in self.layers:
            x = layer(x)
        return functional.linear(self.norm(x), self.wte.weight)


class LlamaLayer(nn.Module):
    def __init__(self, width: int, heads: int, hidden: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.RMSNorm(width, 1e-5), nn.RMSNorm(width, 1e-5)
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.gate, self.up = nn.Linear(width, hidden, bias=False), nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        b, t, c = x.shape
        q, k, v = (
            one.view(b, t, self.heads, -1).transpose(1, 2) for one in self.qkv(self.norm1(x)).split(c, -1)
        )
        q, k = q * cos + _turned(q) * sin, k * cos + _turned(k) * sin
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(y.transpose(1, 2).contiguous().view(b, t, c))
        y = self.norm2(x)
        return x + self.down(functional.silu(self.gate(y)) * self.up(y))


def _turned(x: Tensor) -> Tensor:
    one, two = x.chunk(2, -1)
    return torch.cat((-two, one), -1)


class Llama(nn.Module):
    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, hidden: int, time: int) -> None:
        super().__init__()
        self.wte = nn.Embedding(vocabulary, width)
        self.layers = nn.ModuleList(LlamaLayer(width, heads, hidden) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width, 1e-5), nn.Linear(width, vocabulary, bias=False)
        size = width // heads
        rate = torch.exp(torch.arange(0, size, 2) * (-math.log(10_000.0) / size))
        angle = torch.outer(torch.arange(time).float(), torch.cat((rate, rate)))
        self.register_buffer("cos", angle.cos(), persistent=False)
        self.register_buffer("sin", angle.sin(), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens)
        for layer in self.layers:
            x = layer(x, self.cos, self.sin)
        return self.head(self.norm(x))
