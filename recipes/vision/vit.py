"""The vision encoder: a small ViT and the connector that turns a picture into embeddings for the trunk.

Owns their arithmetic and the names of their weights, both as idefics3 and smolvlm have them. Must not know
what the pictures show.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

EMBEDDING_RMS = 0.13  # of the trunk's token embeddings; the connector begins at that size


@dataclass(frozen=True)
class EyeShape:
    hidden_size: int = 160
    intermediate_size: int = 640
    num_hidden_layers: int = 7
    num_attention_heads: int = 5
    image_size: int = 128
    patch_size: int = 8
    scale_factor: int = 4
    text_hidden_size: int = 576
    layer_norm_eps: float = 1e-6

    @property
    def patches_per_side(self) -> int:
        return self.image_size // self.patch_size

    @property
    def tokens_per_picture(self) -> int:
        return (self.patches_per_side // self.scale_factor) ** 2


class Embeddings(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        size = shape.patch_size
        self.patch_embedding = nn.Conv2d(3, shape.hidden_size, size, stride=size)
        self.position_embedding = nn.Embedding(shape.patches_per_side**2, shape.hidden_size)
        nn.init.normal_(self.position_embedding.weight, std=0.02)

    def forward(self, pixels: Tensor) -> Tensor:
        """[B, 3, H, W] -> [B, patches, hidden]; the convolution, written as the product that it is"""
        conv = self.patch_embedding
        size = conv.stride[0]
        patches = pixels.unflatten(3, (-1, size)).unflatten(2, (-1, size)).permute(0, 2, 4, 1, 3, 5)
        x = F.linear(patches.flatten(3).flatten(1, 2), conv.weight.flatten(1), conv.bias)
        return x + self.position_embedding.weight


class Attention(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        self.heads = shape.num_attention_heads
        size = shape.hidden_size
        self.q_proj, self.k_proj, self.v_proj, self.out_proj = (nn.Linear(size, size) for _ in range(4))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            project(x).unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = F.scaled_dot_product_attention(q, k, v)
        return self.out_proj(out.transpose(1, 2).flatten(2))


class Mlp(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        self.fc1 = nn.Linear(shape.hidden_size, shape.intermediate_size)
        self.fc2 = nn.Linear(shape.intermediate_size, shape.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.fc1(x)))


class Layer(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        self.layer_norm1 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.self_attn = Attention(shape)
        self.layer_norm2 = nn.LayerNorm(shape.hidden_size, eps=shape.layer_norm_eps)
        self.mlp = Mlp(shape)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.self_attn(self.layer_norm1(x))
        return x + self.mlp(self.layer_norm2(x))


class Encoder(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.num_hidden_layers))


class VisionModel(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        self.embeddings = Embeddings(shape)
        self.encoder = Encoder(shape)
        self.post_layernorm = nn.LayerNorm(shape.hidden_size, eps=1e-5)

    def forward(self, pixels: Tensor) -> Tensor:
        x = self.embeddings(pixels)
        for layer in self.encoder.layers:
            x = layer(x)
        return self.post_layernorm(x)


class Projection(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        width = shape.hidden_size * shape.scale_factor**2
        self.proj = nn.Linear(width, shape.text_hidden_size, bias=False)
        nn.init.normal_(self.proj.weight, std=EMBEDDING_RMS / width**0.5)


class Connector(nn.Module):
    def __init__(self, shape: EyeShape) -> None:
        super().__init__()
        self.factor = shape.scale_factor
        self.modality_projection = Projection(shape)

    def forward(self, x: Tensor) -> Tensor:
        """[B, side * side, hidden] -> [B, tokens, text hidden]: squares of patches become one token each"""
        side, factor = int(x.shape[1] ** 0.5), self.factor
        x = x.unflatten(1, (side // factor, factor, side // factor, factor))
        x = x.permute(0, 1, 3, 2, 4, 5)  # rows and columns of squares, then within a square
        return self.modality_projection.proj(x.flatten(3).flatten(1, 2))


class VisionEncoder(nn.Module):
    def __init__(self, shape: EyeShape | None = None) -> None:
        super().__init__()
        self.shape = shape or EyeShape()
        self.vision_model = VisionModel(self.shape)
        self.connector = Connector(self.shape)
        for module in self.vision_model.modules():
            if isinstance(module, nn.Linear):
                nn.init.trunc_normal_(module.weight, std=module.in_features**-0.5)
                nn.init.zeros_(module.bias)
        for layer in self.vision_model.encoder.layers:  # each layer begins as a small correction
            for last in (layer.self_attn.out_proj, layer.mlp.fc2):
                last.weight.data.mul_(0.3)

    def forward(self, pixels: Tensor) -> tuple[Tensor, Tensor]:
        """uint8 [B, H, W, 3] -> patches [B, patches, hidden], embeddings [B, tokens, text hidden]"""
        patches = self.vision_model(normalised(pixels))
        return patches, self.connector(patches)


def normalised(pixels: Tensor) -> Tensor:
    """uint8 [B, H, W, 3] -> float [B, 3, H, W] from -1 to 1, as the image processor does it"""
    return pixels.permute(0, 3, 1, 2).float() / 127.5 - 1


class PatchReader(nn.Module):
    """Reads shape, colour and character off each patch: a lesson for the first steps, thrown away later."""

    def __init__(self, hidden_size: int, classes: tuple[int, ...]) -> None:
        super().__init__()
        self.classes = classes
        self.read = nn.Linear(hidden_size, sum(classes))

    def loss(self, patches: Tensor, labels: Tensor) -> Tensor:
        """patches [B, P, hidden], labels [B, kinds, P]"""
        parts = self.read(patches).float().split(self.classes, dim=-1)
        losses = [F.cross_entropy(p.flatten(0, 1), labels[:, kind].flatten()) for kind, p in enumerate(parts)]
        return torch.stack(losses).sum()
