"""Makes what TorchTitan's wheel lacks: a tokenizer and a text to train on.

    python examples/torchtitan/assets.py DIRECTORY

The text is the source of Python's standard library, a row a module; the tokenizer is byte
pair encoding learnt from it.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 2000
"""Of the 2048 that TorchTitan's debug models have."""


def make(directory: Path) -> None:
    """Writes `tokenizer.json`, `tokenizer_config.json` and `text/train.jsonl`."""
    sources = sorted(Path(argparse.__file__).parent.glob("*.py"))[:60]
    texts = [path.read_text(errors="replace")[:20_000] for path in sources]
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    (directory / "text").mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(directory / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(config))
    rows = "".join(json.dumps({"text": text}) + "\n" for text in texts)
    (directory / "text" / "train.jsonl").write_text(rows)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description="assets for TorchTitan")
    parser.add_argument("directory", type=Path)
    make(parser.parse_args().directory)
