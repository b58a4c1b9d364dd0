"""Images of an episode's columns, for models that label them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from offrl.data.dataset import DataSpec
from offrl.errors import UserError
from offrl.settings.encoder import EncoderConfig
from offrl.settings.train import TrainConfig
from offrl.training.setup import with_encoder

CHUNK = 256  # images that are looked at at once


def seen_by(spec: DataSpec, encoder: EncoderConfig) -> DataSpec:
    """`spec` with the encoder, of single images and the vector."""
    return with_encoder(
        TrainConfig(encoder=encoder), replace(spec, streams=tuple(s for s in spec.streams if s.image), frames=1)
    )


def images_of(spec: DataSpec, columns: Mapping[str, np.ndarray], prefix: str, where: str) -> dict[str, Tensor]:
    """The images [T, H, W, C] of the streams of `spec`, by name, out of the columns `prefix`NAME. Raises UserError for
    those that are missing or of other shapes.
    """
    images = {}
    for stream in spec.streams:
        values = columns.get(prefix + stream.name)
        if values is None or values.shape[1:] != stream.shape:
            size = "none" if values is None else list(values.shape[1:])
            raise UserError(
                f"{where} was learnt on images {stream.name} {list(stream.shape)}, and these data have {size}: read "
                "both with the same dataset.observation_keys and dataset.image_size"
            )
        images[stream.name] = torch.from_numpy(values)
    return images
