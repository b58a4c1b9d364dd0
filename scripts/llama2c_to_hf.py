"""Turn a model in llama2.c's format (stories260K.bin and its relatives) into a folder that transformers, and so
algo=lamo, can read.

    python scripts/llama2c_to_hf.py stories260K.bin FOLDER [tok512.bin]

The file: seven little-endian int32 (width, width of the feed-forward, layers, heads, heads of keys and values, words,
positions; a negative number of words: the head has weights of its own), then float32 tensors, each for all layers, and
before the head's tables of angles that are not needed. Its rotary embedding turns neighbouring pairs of numbers,
transformers' turns the two halves of a head, so rows of the projections to queries and keys change places. The
tokenizer's file (the longest word's length, then for each word its score, length and bytes) becomes a BPE whose merges
stand in the order of their scores. The format: github.com/karpathy/llama2.c.
"""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path

import numpy as np
import safetensors.numpy

SPACE = "\u2581"
FIRST = 259  # the words before are unknown, begin, end, and the 256 bytes
FIELDS = ("dim", "hidden", "layers", "heads", "kv_heads", "vocab", "positions")


def convert(source: Path, folder: Path, tokenizer: Path | None = None) -> None:
    """Write config.json and model.safetensors into `folder`, and tokenizer.json where the words are given."""
    data = source.read_bytes()
    if len(data) < 28:
        raise SystemExit(f"{source} is no model of llama2.c: it is too short")
    sizes = dict(zip(FIELDS, struct.unpack("<7i", data[:28]), strict=True))
    tied, sizes["vocab"] = sizes["vocab"] > 0, abs(sizes["vocab"])
    d, f, n, v = (sizes[k] for k in ("dim", "hidden", "layers", "vocab"))
    head = d // max(1, sizes["heads"])
    kv = head * sizes["kv_heads"]
    shapes = {
        "embed": (v, d),
        "norm1": (n, d),
        "q": (n, d, d),
        "k": (n, kv, d),
        "v": (n, kv, d),
        "o": (n, d, d),
        "norm2": (n, d),
        "gate": (n, f, d),
        "down": (n, d, f),
        "up": (n, f, d),
        "norm": (d,),
        "angles": (2, sizes["positions"], head // 2),
        **({} if tied else {"head": (v, d)}),
    }
    numbers = sum(int(np.prod(shape)) for shape in shapes.values())
    if min(sizes.values()) <= 0 or len(data) != 28 + 4 * numbers:
        raise SystemExit(f"{source} is no model of llama2.c: its sizes ({sizes}) do not fit its {len(data):,} bytes")
    flat, at = np.frombuffer(data, "<f4", offset=28), 0
    w: dict[str, np.ndarray] = {}
    for name, shape in shapes.items():
        w[name] = flat[at : at + int(np.prod(shape))].reshape(shape)
        at += int(np.prod(shape))

    def halves(rows: np.ndarray) -> np.ndarray:
        """Rows of a projection with pairs (0, 1), (2, 3), ... of each head moved to (0, h / 2), (1, h / 2 + 1), ..."""
        return rows.reshape(-1, head // 2, 2, d).swapaxes(1, 2).reshape(-1, d)

    out: dict[str, np.ndarray] = {"model.embed_tokens.weight": w["embed"], "model.norm.weight": w["norm"]}
    for i in range(n):
        at_layer = f"model.layers.{i}."
        out[at_layer + "input_layernorm.weight"] = w["norm1"][i]
        out[at_layer + "post_attention_layernorm.weight"] = w["norm2"][i]
        out[at_layer + "self_attn.q_proj.weight"], out[at_layer + "self_attn.k_proj.weight"] = (
            halves(w["q"][i]),
            halves(w["k"][i]),
        )
        out[at_layer + "self_attn.v_proj.weight"], out[at_layer + "self_attn.o_proj.weight"] = w["v"][i], w["o"][i]
        for name in ("gate", "up", "down"):
            out[at_layer + f"mlp.{name}_proj.weight"] = w[name][i]
    if not tied:
        out["lm_head.weight"] = w["head"]
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": d,
        "intermediate_size": f,
        "num_hidden_layers": n,
        "num_attention_heads": sizes["heads"],
        "num_key_value_heads": sizes["kv_heads"],
        "vocab_size": v,
        "max_position_embeddings": sizes["positions"],
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": tied,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
    }
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(
        {k: np.ascontiguousarray(x) for k, x in out.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n")
    if tokenizer is not None:
        (folder / "tokenizer.json").write_text(json.dumps(words(tokenizer.read_bytes(), v)) + "\n")
        (folder / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}) + "\n")


def words(data: bytes, count: int) -> dict[str, object]:
    """tokenizer.json from llama2.c's tokenizer: sentencepiece's BPE, which merges the pair whose whole has the best
    score.
    """
    vocab: dict[str, int] = {}
    scores, at = [], 4
    for i in range(count):
        score, length = struct.unpack("<fi", data[at : at + 8])
        piece = data[at + 8 : at + 8 + length].decode()
        vocab[piece.strip() if i in (1, 2) else piece.replace(" ", SPACE)] = i
        scores.append(score)
        at += 8 + length
    merges = []
    for piece, i in sorted(vocab.items(), key=lambda item: -scores[item[1]]):
        if i >= FIRST:
            merges += [
                [piece[:k], piece[k:]] for k in range(1, len(piece)) if piece[:k] in vocab and piece[k:] in vocab
            ]
    spaces = {"pattern": {"String": " "}, "content": SPACE}
    back = [
        {"type": "Replace", "pattern": {"String": SPACE}, "content": " "},
        {"type": "ByteFallback"},
        {"type": "Fuse"},
    ]
    return {
        "version": "1.0",
        "added_tokens": [],
        "normalizer": {
            "type": "Sequence",
            "normalizers": [{"type": "Prepend", "prepend": SPACE}, {"type": "Replace", **spaces}],
        },
        "pre_tokenizer": None,
        "post_processor": None,
        "decoder": {"type": "Sequence", "decoders": [*back, {"type": "Strip", "content": " ", "start": 1, "stop": 0}]},
        "model": {
            "type": "BPE",
            "unk_token": "<unk>",
            "fuse_unk": True,
            "byte_fallback": True,
            "vocab": vocab,
            "merges": merges,
        },
    }


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        raise SystemExit("usage: python scripts/llama2c_to_hf.py MODEL.bin FOLDER [TOKENIZER.bin]")
    convert(Path(sys.argv[1]), Path(sys.argv[2]), Path(sys.argv[3]) if len(sys.argv) == 4 else None)
    print(sys.argv[2])
