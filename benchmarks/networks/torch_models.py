"""PyTorch counterparts of the registry's workloads: torchvision, cuDNN GRUs and LSTMs, SDPA attention, EmbeddingBag.

Sizes are those of `workloads`; weights are random.  ``BUILDERS[name](batch, tiny)`` gives a `Model` in float32.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch  # pyright: ignore[reportMissingImports]
from torch import nn  # pyright: ignore[reportMissingImports]
from torch.nn import functional as F  # pyright: ignore[reportMissingImports]

from benchmarks.networks.workloads.deepspeech import CHARACTERS, KERNELS, STRIDES
from benchmarks.networks.workloads.dlrm import TABLES


@dataclass
class Model:
    """A module, its inputs, and for training the optimiser; the module then gives the loss.

    Args: images: 4-dimensional inputs, and weights, are stored channels last; clip: of the gradients' global norm;
    eager: the module compiles parts of itself.
    """

    module: nn.Module
    inputs: tuple[torch.Tensor, ...]
    optimizer: Callable[[Any], Any] | None = None
    clip: float | None = None
    images: bool = False
    eager: bool = False


def sgd(rate: float, momentum: float, fused: bool = True) -> Callable[[Any], Any]:
    """SGD with momentum, all parameters in one kernel."""
    return partial(torch.optim.SGD, lr=rate, momentum=momentum, **({"fused": True} if fused else {}))


def adamw(rate: float, decay: float) -> Callable[[Any], Any]:
    """AdamW, all parameters in one kernel."""
    return partial(torch.optim.AdamW, lr=rate, weight_decay=decay, betas=(0.9, 0.95), fused=True)


class Loss(nn.Module):
    """Mean cross-entropy of a network's logits, as a module."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.network(x).float().flatten(0, -2), labels.flatten())


# -- convolutional networks -----------------------------------------------------------------------------------------
VISION = {
    "ResNet50": "resnet50",
    "DenseNet121": "densenet121",
    "MobileNetV2": "mobilenet_v2",
    "InceptionV3": "inception_v3",
    "EfficientNetB0": "efficientnet_b0",
    "ConvNeXtTiny": "convnext_tiny",
    "ViT_B16": "vit_b_16",
    "Swin_T": "swin_t",
}
"""Names in torchvision."""


def vision(name: str, batch: int, tiny: bool = False, train: bool = False) -> Model:
    """A network of torchvision; its training step: cross-entropy, SGD with momentum."""
    import torchvision  # pyright: ignore[reportMissingImports]

    inception = name == "InceptionV3"
    size = (96 if inception else 32) if tiny else (299 if inception else 224)
    more: dict[str, Any] = {"init_weights": False, "aux_logits": False} if inception else {}
    more |= {"image_size": size} if name == "ViT_B16" else {}
    network = getattr(torchvision.models, VISION[name])(weights=None, **more)
    x = torch.randn(batch, 3, size, size)
    if not train:
        return Model(network, (x,), images=True)
    return Model(Loss(network), (x, torch.arange(batch) % 1000), sgd(0.01, 0.9), images=True)


class UNetBlock(nn.Module):
    """A residual block with a time embedding, then self-attention."""

    def __init__(self, channels: int, heads: int, groups: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.GroupNorm(groups, channels) for _ in range(3))
        self.convs = nn.ModuleList(nn.Conv2d(channels, channels, 3, padding=1) for _ in range(2))
        self.time = nn.Linear(2 * channels, channels)
        self.attention = Attention(channels, heads)

    def forward(self, x: torch.Tensor, time: torch.Tensor) -> torch.Tensor:
        h = self.convs[0](F.silu(self.norms[0](x))) + self.time(F.silu(time))[:, :, None, None]
        x = x + self.convs[1](F.silu(self.norms[1](h)))
        flat = self.norms[2](x).flatten(2).transpose(1, 2)
        return x + self.attention(flat).transpose(1, 2).reshape(x.shape)


def unet(batch: int, tiny: bool = False) -> Model:
    """A U-Net block of a diffusion model."""
    size, channels, heads, groups = (4, 16, 2, 4) if tiny else (32, 640, 8, 32)
    inputs = (torch.randn(batch, channels, size, size), torch.randn(batch, 2 * channels))
    return Model(UNetBlock(channels, heads, groups), inputs, images=True)


# -- transformers ---------------------------------------------------------------------------------------------------
class Attention(nn.Module):
    """Multi-head self-attention by `scaled_dot_product_attention`."""

    def __init__(self, width: int, heads: int, causal: bool = False) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.heads, self.causal = heads, causal

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        n, length, width = x.shape
        q, k, v = self.qkv(x).view(n, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.out(y.transpose(1, 2).reshape(n, length, width))


class Block(nn.Module):
    """A transformer block, normalised before its parts or (BERT) after them."""

    def __init__(self, width: int, heads: int, *, causal: bool = False, post: bool = False, gelu: str = "none") -> None:
        super().__init__()
        self.attention, self.post, self.gelu = Attention(width, heads, causal), post, gelu
        self.n1, self.n2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x), approximate=self.gelu))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.post:
            x = self.n1(x + self.attention(x))
            return self.n2(x + self.mlp(x))
        x = x + self.attention(self.n1(x))
        return x + self.mlp(self.n2(x))


class Bert(nn.Module):
    """BERT's encoder with its embeddings; with a head the logits of the answer's start and end."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int, head: bool = True) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.norm = nn.LayerNorm(width)
        self.layers = nn.Sequential(*(Block(width, heads, post=True) for _ in range(layers)))
        self.head = nn.Linear(width, 2, bias=False) if head else nn.Identity()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.layers(self.norm(self.words(tokens) + self.places)))


class SpanLoss(nn.Module):
    """Cross-entropy of start and end of the answer."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, tokens: torch.Tensor, spans: torch.Tensor) -> torch.Tensor:
        logits = self.network(tokens).float().transpose(1, 2)
        return F.cross_entropy(logits.flatten(0, 1), spans.flatten())


def bert(batch: int, tiny: bool = False, train: bool = False, base: bool = False) -> Model:
    """BERT-large for SQuAD, 384 tokens; its fine-tuning step; BERT-base without a head."""
    layers, width, heads = (12, 768, 12) if base else (24, 1024, 16)
    length, vocabulary = 384, 30522
    if tiny:
        layers, width, heads, length, vocabulary = 1, 16, 2, 8, 30
    network = Bert(layers, width, heads, length, vocabulary, head=not base)
    tokens = torch.randint(0, vocabulary, (batch, length))
    if not train:
        return Model(network, (tokens,))
    spans = torch.stack([torch.arange(batch) % length, (torch.arange(batch) + 2) % length], 1)
    return Model(SpanLoss(network), (tokens, spans), adamw(3e-5, 0.01), clip=1.0)


class Gpt(nn.Module):
    """A GPT whose output projection is its embedding."""

    def __init__(self, layers: int, width: int, heads: int, length: int, vocabulary: int) -> None:
        super().__init__()
        self.words = nn.Embedding(vocabulary, width)
        self.places = nn.Parameter(0.02 * torch.randn(length, width))
        self.layers = nn.Sequential(*(Block(width, heads, causal=True, gelu="tanh") for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.layers(self.words(tokens) + self.places)
        return F.linear(self.norm(x), self.words.weight)


def gpt_training(batch: int, tiny: bool = False) -> Model:
    """A training step of a GPT: next-token cross-entropy, AdamW with clipping."""
    layers, width, heads, length, vocabulary = (1, 16, 2, 8, 40) if tiny else (6, 768, 12, 512, 32000)
    tokens = torch.randint(0, vocabulary, (batch, length + 1))
    network = Gpt(layers, width, heads, length, vocabulary)
    return Model(Loss(network), (tokens[:, :-1].contiguous(), tokens[:, 1:].contiguous()), adamw(3e-4, 0.1), clip=1.0)


class WhisperEncoder(nn.Module):
    """Whisper's audio encoder."""

    def __init__(self, frames: int, bands: int, layers: int, width: int, heads: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv1d(bands, width, 3, padding=1)
        self.conv2 = nn.Conv1d(width, width, 3, stride=2, padding=1)
        rates = torch.exp(-math.log(10000.0) / (width // 2 - 1) * torch.arange(width // 2))
        angles = torch.arange(frames // 2)[:, None] * rates
        self.register_buffer("places", torch.cat([angles.sin(), angles.cos()], 1))
        self.layers = nn.Sequential(*(Block(width, heads) for _ in range(layers)))
        self.norm = nn.LayerNorm(width)

    def forward(self, mel: torch.Tensor) -> torch.Tensor:
        x = F.gelu(self.conv2(F.gelu(self.conv1(mel)))).transpose(1, 2) + self.places
        return self.norm(self.layers(x))


def whisper(batch: int, tiny: bool = False) -> Model:
    """Whisper-tiny's encoder on 30 seconds."""
    frames, bands, layers, width, heads = (16, 8, 1, 16, 2) if tiny else (3000, 80, 4, 384, 6)
    return Model(WhisperEncoder(frames, bands, layers, width, heads), (torch.randn(batch, bands, frames),))


# -- decoder --------------------------------------------------------------------------------------------------------
class LlamaLayer(nn.Module):
    """Grouped-query attention with rotary embedding, and a gated network."""

    def __init__(self, width: int, heads: int, shared: int, hidden: int) -> None:
        super().__init__()
        self.heads, self.shared, self.depth = heads, shared, width // heads
        self.q, self.o = nn.Linear(width, width, bias=False), nn.Linear(width, width, bias=False)
        self.kv = nn.Linear(width, 2 * shared * self.depth, bias=False)
        self.gate_up, self.down = nn.Linear(width, 2 * hidden, bias=False), nn.Linear(hidden, width, bias=False)
        self.n1, self.n2 = nn.RMSNorm(width, eps=1e-5), nn.RMSNorm(width, eps=1e-5)

    def rotated(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        half = self.depth // 2
        rates = 500000.0 ** (-torch.arange(half, device=x.device) / half)
        angles = positions[:, None] * rates
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def forward(self, x: torch.Tensor, positions: torch.Tensor, cache: torch.Tensor | None) -> Any:
        n, length, width = x.shape
        h = self.n1(x)
        q = self.rotated(self.q(h).view(n, length, self.heads, -1).transpose(1, 2), positions)
        k, v = self.kv(h).view(n, length, 2, self.shared, -1).permute(2, 0, 3, 1, 4)
        k, mask = self.rotated(k, positions), None
        if cache is not None:
            cache[0].index_copy_(2, positions, k)
            cache[1].index_copy_(2, positions, v)
            k, v = cache[0], cache[1]
            mask = (torch.arange(k.shape[2], device=x.device) <= positions)[None]
        y = F.scaled_dot_product_attention(q, k, v, mask, is_causal=cache is None, enable_gqa=True)
        x = x + self.o(y.transpose(1, 2).reshape(n, length, width))
        gate, up = self.gate_up(self.n2(x)).chunk(2, -1)
        return x + self.down(F.silu(gate) * up), k, v


class Llama(nn.Module):
    """Llama-style decoder: prefill, or a step by caches that are written in place."""

    def __init__(self, batch: int, tiny: bool, step: bool) -> None:
        super().__init__()
        from benchmarks.networks.workloads.decoder import TINY, Sizes

        s = TINY if tiny else Sizes()
        self.words = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(LlamaLayer(s.width, s.heads, s.shared, s.hidden) for _ in range(s.layers))
        self.norm, self.length = nn.RMSNorm(s.width, eps=1e-5), s.length
        for i in range(s.layers if step else 0):
            self.register_buffer(f"cache{i}", torch.randn(2, batch, s.shared, s.length, s.depth))

    def forward(self, tokens: torch.Tensor, position: torch.Tensor | None = None) -> Any:
        x, kept = self.words(tokens), []
        positions = torch.arange(self.length, device=tokens.device) if position is None else position
        for i, layer in enumerate(self.layers):
            x, k, v = layer(x, positions, None if position is None else getattr(self, f"cache{i}"))
            kept.append((k, v))
        logits = F.linear(self.norm(x)[:, -1], self.words.weight)
        return (logits, kept) if position is None else (logits, logits.argmax(-1))


def llama(batch: int, tiny: bool = False, step: bool = False) -> Model:
    """Llama 3.2 1B: prefill of 2048 tokens, or a decoding step."""
    network = Llama(batch, tiny, step)
    tokens = torch.randint(0, network.words.num_embeddings, (batch, 1 if step else network.length))
    return Model(network, (tokens, torch.tensor([network.length // 2])) if step else (tokens,))


# -- recurrent networks ---------------------------------------------------------------------------------------------
class DeepSpeech2(nn.Module):
    """Convolutions over a spectrogram and bidirectional GRUs (cuDNN), directions added."""

    def __init__(self, bands: int, channels: int, width: int, layers: int) -> None:
        super().__init__()
        self.convs, self.norms = nn.ModuleList(), nn.ModuleList()
        for k, (kernel, stride) in enumerate(zip(KERNELS, STRIDES, strict=True)):
            padding = (kernel[0] // 2, kernel[1] // 2)
            self.convs.append(nn.Conv2d(channels if k else 1, channels, kernel, stride, padding, bias=False))
            self.norms.append(nn.BatchNorm2d(channels))
        sizes = [(bands + 3) // 4 * channels, *([width] * (layers - 1))]
        self.grus = nn.ModuleList(nn.GRU(size, width, bidirectional=True) for size in sizes)
        self.between = nn.ModuleList(nn.BatchNorm1d(size) for size in (*sizes, width))
        self.out = nn.Linear(width, CHARACTERS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = norm(conv(x)).clamp(0, 20)
        n, channels, bands, frames = x.shape
        x = x.permute(3, 0, 2, 1).reshape(frames, n, bands * channels)
        for norm, gru in zip(self.between, self.grus, strict=False):
            x = gru(norm(x.flatten(0, 1)).view_as(x))[0].view(frames, n, 2, -1).sum(2)
        return F.log_softmax(self.out(self.between[-1](x.flatten(0, 1))).view(frames, n, -1), -1)


class CtcLoss(nn.Module):
    """Connectionist temporal classification."""

    def __init__(self, network: nn.Module) -> None:
        super().__init__()
        self.network = network

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        scores = self.network(x).float()
        n = labels.shape[0]
        return F.ctc_loss(scores, labels, (scores.shape[0],) * n, (labels.shape[1],) * n)


def deepspeech2(batch: int, tiny: bool = False, train: bool = False) -> Model:
    """DeepSpeech2 on 4 seconds; its training step: CTC loss, SGD with momentum and clipping."""
    bands, frames, channels, width, layers = (16, 16, 2, 8, 1) if tiny else (161, 400, 32, 800, 5)
    network = DeepSpeech2(bands, channels, width, layers)
    x = torch.randn(batch, 1, bands, frames)
    if not train:
        return Model(network, (x,))
    labels = torch.randint(1, CHARACTERS, (batch, 3 if tiny else 40))
    return Model(CtcLoss(network), (x, labels), sgd(3e-4, 0.9), clip=400.0)


class AttentionRnn(nn.Module):
    """Luong attention RNN: the encoder is cuDNN's LSTM; a step of the decoder is compiled and called per word."""

    def __init__(self, layers: int, width: int, vocabulary: int) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(vocabulary, width), nn.Embedding(vocabulary, width)
        self.encoder = nn.LSTM(width, width, layers, batch_first=True)
        self.cells = nn.ModuleList(nn.LSTMCell(width if k else 2 * width, width) for k in range(layers))
        self.score, self.mix = nn.Linear(width, width, bias=False), nn.Linear(2 * width, width, bias=False)
        self.out = nn.Linear(width, vocabulary, bias=False)
        self.step = self.one_step
        self.width = width

    def one_step(self, memory: torch.Tensor, keys: torch.Tensor, states: Any, fed: torch.Tensor, token: Any) -> Any:
        x, new = torch.cat([self.target(token), fed], -1), []
        for cell, state in zip(self.cells, states, strict=True):
            new.append(cell(x, state))
            x = new[-1][0]
        weights = torch.softmax(torch.einsum("bd,btd->bt", x, keys), -1)
        context = torch.einsum("bt,btd->bd", weights, memory)
        return new, torch.tanh(self.mix(torch.cat([context, x], -1)))

    def forward(self, source: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        memory, (h, c) = self.encoder(self.source(source))
        keys = self.score(memory)
        states = [(h[k].contiguous(), c[k].contiguous()) for k in range(len(self.cells))]
        fed, outputs = torch.zeros_like(memory[:, 0]), []
        token = torch.zeros_like(source[:, 0])
        for t in range(source.shape[1]):
            states, fed = self.step(memory, keys, states, fed, token if target is None else target[:, t])
            if target is None:
                token = self.out(fed).argmax(-1)
                outputs.append(token)
            else:
                outputs.append(fed)
        if target is None:
            return torch.stack(outputs, 1)
        logits = self.out(torch.stack(outputs, 1))
        return F.cross_entropy(logits.float().flatten(0, 1), target[:, 1:].flatten())


def attention_rnn(batch: int, tiny: bool = False, train: bool = False) -> Model:
    """Luong attention RNN: greedy translation of 50 words, or a training step with teacher forcing."""
    layers, width, vocabulary, length = (2, 8, 20, 4) if tiny else (4, 1000, 50000, 50)
    network = AttentionRnn(layers, width, vocabulary)
    source = torch.randint(0, vocabulary, (batch, length))
    if not train:
        return Model(network, (source,), eager=True)
    target = torch.randint(0, vocabulary, (batch, length + 1))
    return Model(network, (source, target), sgd(1.0, 0.0), clip=5.0, eager=True)


# -- recommendation -------------------------------------------------------------------------------------------------
def stack(sizes: tuple[int, ...]) -> nn.Sequential:
    """Dense layers with ReLU."""
    return nn.Sequential(*(part for a, b in pairwise(sizes) for part in (nn.Linear(a, b), nn.ReLU())))


class Dlrm(nn.Module):
    """DLRM: `EmbeddingBag` per table (sparse gradients in training), everything else compiled as one."""

    def __init__(self, tiny: bool, train: bool) -> None:
        super().__init__()
        tables, depth = ((5, 7, 9), 4) if tiny else (TABLES, 16)
        bottom, top = ((13, 8, depth), (8,)) if tiny else ((13, 512, 256, 64, depth), (512, 256))
        count = len(tables) + 1
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, depth, mode="sum", sparse=train) for n in tables)
        self.bottom = stack(bottom)
        self.top = stack((depth + count * (count - 1) // 2, *top))
        self.last = nn.Linear(top[-1], 1)
        self.step = self.dense
        i, j = torch.tril_indices(count, count, -1)
        self.register_buffer("pairs", i * count + j)

    def dense(self, numbers: torch.Tensor, looked: list[torch.Tensor]) -> torch.Tensor:
        bottom = self.bottom(numbers)
        features = torch.stack([bottom, *looked], 1).to(bottom.dtype)
        pairs = torch.bmm(features, features.transpose(1, 2)).flatten(1)[:, self.pairs]
        return self.last(self.top(torch.cat([bottom, pairs], 1)))[:, 0]

    def forward(self, numbers: torch.Tensor, rows: torch.Tensor, clicks: torch.Tensor | None = None) -> torch.Tensor:
        z = self.step(numbers, [table(rows[:, i : i + 1]) for i, table in enumerate(self.tables)])
        return torch.sigmoid(z) if clicks is None else F.binary_cross_entropy_with_logits(z.float(), clicks)


def dlrm(batch: int, tiny: bool = False, train: bool = False) -> Model:
    """DLRM of Criteo's Kaggle sizes; its training step: binary cross-entropy, SGD."""
    network = Dlrm(tiny, train)
    rows = torch.stack([torch.randint(0, t.num_embeddings, (batch,)) for t in network.tables], 1)
    numbers = torch.randn(batch, 13)
    if not train:
        return Model(network, (numbers, rows))
    return Model(network, (numbers, rows, (torch.arange(batch) % 2).float()), sgd(0.1, 0.0, fused=False), eager=True)


BUILDERS: dict[str, Callable[..., Model]] = {
    **{name: partial(vision, name) for name in VISION},
    **{f"{name}_training": partial(vision, name, train=True) for name in list(VISION)[:4]},
    "UNet_block": unet,
    "bert": partial(bert, base=True),
    "BERT_large": bert,
    "BERT_large_training": partial(bert, train=True),
    "GPT_training": gpt_training,
    "Whisper_tiny_encoder": whisper,
    "Llama_prefill": llama,
    "Llama_decode": partial(llama, step=True),
    "DeepSpeech2": deepspeech2,
    "DeepSpeech2_training": partial(deepspeech2, train=True),
    "AttentionRNN": attention_rnn,
    "AttentionRNN_training": partial(attention_rnn, train=True),
    "DLRM": dlrm,
    "DLRM_training": partial(dlrm, train=True),
}
"""By the names of `workloads.WORKLOADS` (``bert`` is BERT-base)."""
