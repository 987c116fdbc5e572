"""Trains a small language model with a quarter of the RAM that its state takes, kills the run, resumes it, and compares
the result with a run in RAM, bit for bit.

Run it with `make demo`. It takes about a minute on two CPU cores and writes runs/demo/ (a former demo there is
removed). The text is the source code of Python's standard library; each byte is a token.
"""

import hashlib
import json
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

OUT = Path("runs/demo")
RAM = "40MiB"
STEPS, SAVED, KILLED = 20, 10, 12
"""Steps of a run, those after which it saves, and the fewest after which it is killed."""
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": 256,
    "hidden_size": 384,
    "intermediate_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 6,
    "tie_word_embeddings": True,
}
"""A Llama of 14 million parameters: 12 bytes of state for each are four times the RAM."""
SHOWN = ("Plan:", "step ", "Checkpoint:", "Resum", "Report:")
"""Beginnings of the lines that the demo shows."""


def main() -> None:
    """Four commands, then what they show."""
    began = time.perf_counter()
    shutil.rmtree(OUT, ignore_errors=True)
    (OUT / "model").mkdir(parents=True)
    (OUT / "model" / "config.json").write_text(json.dumps(MODEL))
    (OUT / "pages").mkdir()
    paged, whole = OUT / "paged", OUT / "in-ram"
    train = f"train --model {OUT}/model --data stdlib --precision fp32 --learning-rate 1e-3"
    train = f"{train} --per-device-train-batch-size 2 --max-length 256 --max-steps {STEPS} --save-steps {SAVED}"

    print(f"1. A run with {RAM} of RAM for weights and Adam's moments. The rest is in files in {OUT}/pages.")
    print("   A unit is a part of the model that moves as a whole, and a page is a piece of it. 'stalls' is the share")
    print("   of a step for which compute waited, and what it waited for most, such as ssd_read. kill -9 ends the run.")
    killed = pagoda(f"{train} --memory.host {RAM} --memory.ssd {OUT}/pages --output-dir {paged}", kill_after=KILLED)
    print(f"\n2. The killed run resumes. It goes on after step {SAVED}, its last checkpoint.")
    pagoda(f"train --resume-from-checkpoint last --memory.ssd {OUT}/pages --output-dir {paged}")
    print("\n3. The same run with all state in RAM, not interrupted.")
    pagoda(f"{train} --output-dir {whole}")
    print("\n4. A report to open in a browser: losses, the plan, and when drive and compute worked.")
    pagoda(f"report {paged} --out {OUT}/report.html")

    print("\nWhat this shows:")
    for line in shown(paged, whole, killed):
        print(f"- {line}")
    print(
        f"It took {time.perf_counter() - began:.0f} s. Open {OUT}/report.html in a browser, and go on with README.md."
    )


def shown(paged: Path, whole: Path, killed: int) -> Iterator[str]:
    """A sentence for each promise, from what the two runs wrote. Ends the demo if their bits differ."""
    steps, reference = metrics(paged), metrics(whole)
    if [step["loss"] for step in steps] != [step["loss"] for step in reference] or digest(paged) != digest(whole):
        raise SystemExit("The two runs differ. This must not be: please report it.")
    plan = json.loads((paged / "plan.json").read_text())
    states = {name: plan["bytes"]["ssd"][name] for name in ("weight", "exp_avg", "exp_avg_sq")}
    held, planned = (max(step["peak_bytes"]["host"] for step in steps), sum(plan["bytes"]["host"].values()))
    times = [median(step["step_s"] for step in run) for run in (steps, reference)]
    stalls = sum(sum(step["stall_s"].values()) for step in steps) / sum(step["step_s"] for step in steps)
    yield (
        f"Same bits: all {STEPS} losses ({steps[0]['loss']:.2f} -> {steps[-1]['loss']:.2f}) and all weights are those"
        " of the run in RAM."
    )
    yield (
        f"One home per byte: weights and Adam's two moments take {mib(sum(states.values()))},"
        f" {sum(states.values()) / plan['params']:.1f} bytes a parameter (three fp32 numbers take 12)."
    )
    yield f"The plan is the truth: state took {mib(held)} of RAM at most, and the plan had {mib(planned)}."
    yield f"Nothing is lost: killed after step {killed}, resumed after step {SAVED}, and the result is the same."
    yield (
        f"Close to the limit: a step takes {times[0]:.2f} s, and {times[1]:.2f} s in RAM; compute waited for the SSD"
        f" and other work for {stalls:.0%} of it."
    )


def metrics(run: Path) -> list[dict[str, Any]]:
    """The lines of a run's steps."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def digest(run: Path) -> str:
    """A hash of the weights after the last step."""
    from pagoda.checkpoint.export import export

    export(run / f"checkpoint-{STEPS}" / "pagoda", run / "exported")
    return hashlib.sha256((run / "exported" / "model.safetensors").read_bytes()).hexdigest()


def mib(count: int) -> str:
    """Bytes in MiB."""
    return f"{count / 2**20:.0f} MiB"


def pagoda(arguments: str, kill_after: int | None = None) -> int:
    """Runs a command and shows some of its lines. Kills it after that step, or a later one that it prints. Returns the
    last step that it printed."""
    print(f"$ pagoda {arguments}", flush=True)
    command = [sys.executable, "-m", "pagoda", *arguments.split()]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        lines, step = [], 0
        for line in process.stdout:
            lines.append(line)
            if line.startswith(SHOWN):
                print(f"  {line}", end="", flush=True)
            if match := re.match(r"step (\d+)/", line):
                step = int(match[1])
                if kill_after is not None and step >= kill_after:
                    process.kill()
                    break
    if process.returncode != (0 if kill_after is None else -signal.SIGKILL):
        raise SystemExit("".join(lines))
    return step


if __name__ == "__main__":
    main()
