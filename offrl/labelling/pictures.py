"""Pictures in questions to a language model: a question is a text that names them, and an endpoint is sent files."""

from __future__ import annotations

import base64
import hashlib
import io
import re
from typing import Any

import numpy as np

MARK = re.compile(r"\[picture ([0-9a-f]{64})\]")


class Pictures(dict[str, bytes]):
    """PNG files by the SHA-256 of what they hold."""

    def name(self, image: np.ndarray) -> str:
        """What stands for an image [H, W, C] of uint8, 1 to 4 channels, in a question; the file is kept."""
        from PIL import Image

        file = io.BytesIO()
        Image.fromarray(image.squeeze(-1) if image.shape[-1] == 1 else image).save(file, "PNG")
        # of the pixels: another version of the package may write other bytes
        digest = hashlib.sha256(f"{image.shape} ".encode() + np.ascontiguousarray(image).tobytes()).hexdigest()
        self[digest] = file.getvalue()
        return f"[picture {digest}]"

    def content(self, prompt: str) -> str | list[dict[str, Any]]:
        """A question as the content of a message of OpenAI's protocol: itself, or the parts between which known
        pictures stand.
        """
        parts: list[dict[str, Any]] = []
        end = 0
        for mark in MARK.finditer(prompt):
            if mark[1] in self:
                address = "data:image/png;base64," + base64.b64encode(self[mark[1]]).decode()
                parts += [{"type": "text", "text": text}] if (text := prompt[end : mark.start()]) else []
                parts.append({"type": "image_url", "image_url": {"url": address}})
                end = mark.end()
        return [*parts, {"type": "text", "text": prompt[end:]}] if parts else prompt
