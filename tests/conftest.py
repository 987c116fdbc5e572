"""Every test runs in poison mode: freed frames hold NaN, so a lease used after its end shows."""

import os

os.environ["PAGODA_POISON"] = "1"
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
