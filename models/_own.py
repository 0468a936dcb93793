"""Models written with torch alone, in the ways in which people write them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from ._entry import VOCABULARY, WIDTH, Batch, Entry, tokens


class Translator(nn.Module):
    """torch's own encoder and decoder, with one embedding for both and for the scores."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.place = nn.Parameter(0.1 * torch.randn(64, WIDTH))
        self.transformer = nn.Transformer(
            WIDTH, 4, num_encoder_layers=4, num_decoder_layers=4, dim_feedforward=64, dropout=0.0, batch_first=True
        )
        self.bias = nn.Parameter(torch.zeros(VOCABULARY))

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        seen = self.transformer.generate_square_subsequent_mask(target.shape[1], source.device, self.place.dtype)
        source, target = (self.embedding(ids) + self.place[: ids.shape[1]] for ids in (source, target))
        hidden = self.transformer(source, target, tgt_mask=seen, tgt_is_causal=True)
        return functional.linear(hidden, self.embedding.weight, self.bias)


def translated(size: int) -> Batch:
    return Batch((tokens(size), tokens(size, 9)), target=tokens(size, 9))


def next_token(scores: Tensor, target: Tensor) -> Tensor:
    return functional.cross_entropy(scores.flatten(0, 1), target.flatten())


class Both(nn.Module):
    """Two convolutions, each with a norm over the batch."""

    def __init__(self, inside: int, outside: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, padding=1)
        self.norm = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return functional.silu(self.second(functional.silu(self.norm(self.first(x)))))


class UNet(nn.Module):
    """Down and up again, with what was on the way down handed over at each size, and the time in every block's way."""

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Sequential(nn.Linear(1, 16), nn.SiLU(), nn.Linear(16, 32))
        self.down = nn.ModuleList([Both(3, 8), Both(8, 16), Both(16, 32)])
        self.middle = Both(32, 32)
        self.up = nn.ModuleList([Both(64, 16), Both(32, 8), Both(16, 8)])
        self.out = nn.Conv2d(8, 3, 1)

    def forward(self, x: Tensor, *, time: Tensor) -> dict[str, Tensor]:
        skipped = []
        for block in self.down:
            x = block(x)
            skipped.append(x)
            x = functional.max_pool2d(x, 2)
        x = self.middle(x + self.time(time)[:, :, None, None])
        for block in self.up:
            skip = skipped.pop()
            x = block(torch.cat([functional.interpolate(x, size=skip.shape[-2:], mode="nearest"), skip], dim=1))
        return {"noise": self.out(x), "skipped": len(skipped)}


def noisy(size: int) -> Batch:
    return Batch((torch.randn(size, 3, 16, 16),), {"time": torch.rand(size, 1)}, torch.randn(size, 3, 16, 16))


def noise(output: dict[str, Tensor], target: Tensor) -> Tensor:
    return functional.mse_loss(output["noise"], target)


class Bottleneck(nn.Module):
    def __init__(self, inside: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(inside, width, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3, self.bn3 = nn.Conv2d(width, 2 * width, 1, bias=False), nn.BatchNorm2d(2 * width)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = None
        if stride > 1 or inside != 2 * width:
            self.downsample = nn.Sequential(
                nn.Conv2d(inside, 2 * width, 1, stride, bias=False), nn.BatchNorm2d(2 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        out = self.relu(self.bn1(self.conv1(x)))
        out = self.bn3(self.conv3(self.relu(self.bn2(self.conv2(out)))))
        out += x if self.downsample is None else self.downsample(x)  # in place, as in torchvision
        return self.relu(out)


class ResNet(nn.Module):
    """As in torchvision: groups of blocks in `nn.Sequential`, in-place ReLU, statistics of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)
        self.relu, self.maxpool = nn.ReLU(inplace=True), nn.MaxPool2d(3, 2, 1)
        self.layer1 = nn.Sequential(Bottleneck(8, 8, 1), Bottleneck(16, 8, 1))
        self.layer2 = nn.Sequential(Bottleneck(16, 16, 2), Bottleneck(32, 16, 1))
        self.layer3 = nn.Sequential(Bottleneck(32, 32, 2), Bottleneck(64, 32, 1))
        self.avgpool = nn.AdaptiveAvgPool2d(1)
        self.fc = nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        x = self.maxpool(self.relu(self.bn1(self.conv1(x))))
        x = self.layer3(self.layer2(self.layer1(x)))
        return self.fc(torch.flatten(self.avgpool(x), 1))


def pictured(size: int) -> Batch:
    return Batch((torch.randn(size, 3, 32, 32),), target=torch.randint(5, (size,)))


class WindowAttention(nn.Module):
    """Attention inside windows of 4 x 4, with a bias for each relative place."""

    def __init__(self, width: int, heads: int, shift: int) -> None:
        super().__init__()
        self.heads, self.shift = heads, shift
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.bias_table = nn.Parameter(0.1 * torch.randn(49, heads))
        place = torch.stack(torch.meshgrid(torch.arange(4), torch.arange(4), indexing="ij")).flatten(1)
        apart = place[:, :, None] - place[:, None, :] + 3
        self.register_buffer("index", apart[0] * 7 + apart[1])

    def forward(self, x: Tensor) -> Tensor:
        batch, height, width, channels = x.shape
        shift = self.shift if min(height, width) > 4 else 0
        x = torch.roll(x, (-shift, -shift), (1, 2)) if shift else x
        windows = x.view(batch, height // 4, 4, width // 4, 4, channels).transpose(2, 3).reshape(-1, 16, channels)
        query, key, value = self.qkv(windows).view(-1, 16, 3, self.heads, channels // self.heads).permute(2, 0, 3, 1, 4)
        scores = query @ key.transpose(-2, -1) / query.shape[-1] ** 0.5 + self.bias_table[self.index].permute(2, 0, 1)
        if shift:
            edges = [slice(0, -4), slice(-4, -shift), slice(-shift, None)]
            region = x.new_zeros(height, width)
            for number, (rows, columns) in enumerate((rows, columns) for rows in edges for columns in edges):
                region[rows, columns] = number
            region = region.view(height // 4, 4, width // 4, 4).transpose(1, 2).reshape(-1, 16)
            apart = (region[:, None] != region[:, :, None]).to(scores.dtype) * -100.0
            scores = (scores.view(batch, -1, *scores.shape[1:]) + apart[:, None]).view(scores.shape)
        mixed = self.proj((scores.softmax(-1) @ value).transpose(1, 2).reshape(-1, 16, channels))
        mixed = mixed.view(batch, height // 4, width // 4, 4, 4, channels).transpose(2, 3).reshape(x.shape)
        return torch.roll(mixed, (shift, shift), (1, 2)) if shift else mixed


class SwinBlock(nn.Module):
    def __init__(self, width: int, shift: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn = WindowAttention(width, 4, shift)
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class PatchMerging(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.reduction = nn.LayerNorm(4 * width), nn.Linear(4 * width, 2 * width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        corners = [x[:, row::2, column::2] for column in (0, 1) for row in (0, 1)]
        return self.reduction(self.norm(torch.cat(corners, -1)))


class Swin(nn.Module):
    """As in torchvision: shifted windows, patches merged between groups of blocks, all in one `nn.Sequential`."""

    def __init__(self) -> None:
        super().__init__()
        stem = nn.Sequential(nn.Conv2d(3, 16, 2, 2), Permute(0, 2, 3, 1), nn.LayerNorm(16))
        first = nn.Sequential(SwinBlock(16, 0), SwinBlock(16, 2))
        second = nn.Sequential(SwinBlock(32, 0), SwinBlock(32, 2))
        third = nn.Sequential(SwinBlock(64, 0), SwinBlock(64, 2))
        self.features = nn.Sequential(stem, first, PatchMerging(16), second, PatchMerging(32), third)
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 5)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.features(x)).mean((1, 2)))


class Permute(nn.Module):
    def __init__(self, *dims: int) -> None:
        super().__init__()
        self.dims = dims

    def forward(self, x: Tensor) -> Tensor:
        return x.permute(self.dims)


OWN = (
    Entry("nn.Transformer", Translator, translated, next_token),
    Entry("U-Net", UNet, noisy, noise),
    Entry("ResNet (torchvision's way)", ResNet, pictured, functional.cross_entropy),
    Entry("Swin (torchvision's way)", Swin, pictured, functional.cross_entropy),
)
