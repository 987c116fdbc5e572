"""How fast `pagoda train` makes tokens of a text file, against the tokenizer alone, and in how much RAM.

    python benchmarks/data.py --out tokens.json [--megabytes 1000]

Both tokenize the same text, by turns: the tokenizer in batches of a million characters that are in RAM already; Pagoda
from the file to its cache, on the disk. The file is the standard library's text, over and over. Peak memory is of
processes of their own, for the file and for a tenth of it: it must not grow.
"""

import json
import multiprocessing
import resource
import tempfile
import time
from pathlib import Path
from statistics import median

import tyro
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from pagoda.config.reading import DataSettings
from pagoda.train.seen import Seen
from pagoda.train.sources import documents, find
from pagoda.train.tokenizer import Tokenizer as ModelTokenizer
from pagoda.train.tokens import open_tokens
from script import write

_MIB = 1 << 20
_TURNS = 3


def make_tokenizer(text: str, directory: Path) -> None:
    """A byte-level BPE of 32,000 tokens, as those of GPT-2 and Llama 3 are."""
    raw = Tokenizer(models.BPE())
    raw.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(
        [text], trainers.BpeTrainer(vocab_size=32_000, special_tokens=["<end>"], initial_alphabet=alphabet)
    )
    PreTrainedTokenizerFast(tokenizer_object=raw, eos_token="<end>").save_pretrained(directory)


def peak_mib(file: Path, tokenizer: Path, cache: Path) -> float:
    """Peak resident memory of a process that tokenizes a file, in MiB."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(_tokenized, (file, tokenizer, cache))


def _tokenized(file: Path, tokenizer: Path, cache: Path) -> float:
    open_tokens(str(file), ModelTokenizer(tokenizer), cache=cache)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main(megabytes: int = 1000, out: Path | None = None) -> None:
    """Print the speeds and the peaks."""
    text = "".join(document.text for document in documents(find("stdlib", DataSettings(), "train"), Seen()))
    pieces = [text[at : at + _MIB // 8] for at in range(0, min(len(text), 16 * _MIB), _MIB // 8)]
    with tempfile.TemporaryDirectory(dir=".") as folder:
        root = Path(folder)
        make_tokenizer(text[: 4 * _MIB], root / "tokenizer")
        tokenizer = ModelTokenizer(root / "tokenizer")
        small, large = root / "small.txt", root / "large.txt"
        small.write_text("".join(pieces))
        alone, ours = [], []
        for turn in range(_TURNS):
            started = time.perf_counter()
            for at in range(0, len(pieces), 8):
                tokenizer._tokenizer(pieces[at : at + 8], add_special_tokens=False)
            alone.append(time.perf_counter() - started)
            started = time.perf_counter()
            open_tokens(str(small), tokenizer, cache=root / f"cache-{turn}")
            ours.append(time.perf_counter() - started)
        nbytes = small.stat().st_size
        with large.open("w") as file:
            for _ in range(-(-megabytes * 1_000_000 // nbytes)):
                file.write("".join(pieces))
        peaks = {path.name: peak_mib(path, root / "tokenizer", root / "peaks") for path in (small, large)}
        found = {
            "megabytes": {path.name: path.stat().st_size / 1e6 for path in (small, large)},
            "tokenizer alone, MB/s": nbytes / 1e6 / median(alone),
            "pagoda, MB/s": nbytes / 1e6 / median(ours),
            "share of the tokenizer's speed": median(alone) / median(ours),
            "peak MiB": peaks,
        }
    print(json.dumps(found, indent=1))
    write(out, found)


if __name__ == "__main__":
    tyro.cli(main)
