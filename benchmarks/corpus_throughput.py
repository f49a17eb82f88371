"""Measure the speed and memory of `unheard prepare` on JSON lines, compared with a simple script (corpus_baseline.py).

    python benchmarks/corpus_input.py /tmp/input.jsonl 1
    python benchmarks/corpus_throughput.py /tmp/input.jsonl            # both, and their ratio
    python benchmarks/corpus_throughput.py /tmp/input.jsonl --ours     # only `prepare`: the script needs four times the
                                                                       # size of its input in memory

Each program runs in its own process on the same file. The file is read once before, so that no program waits for the
disk. The order is `prepare`, the script, `prepare`; the ratio uses the mean of the two runs of `prepare`. Memory is the
sum of the proportional set sizes of a process and its children, read once a second. This reading takes processor time.
On two cores it slows `prepare`, which uses both, but not the script, which uses one.
"""

import os
import resource
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

CAP = 1600
"""Largest number of tokens per user."""
OURS = """
import sys
from unheard.corpus.pipeline import Preparation
from unheard.corpus.pipeline import build_store
from unheard.corpus.sources import Fields
from unheard.corpus.sources import find_sources
from unheard.corpus.encode import EncodingOptions
if __name__ == "__main__":
    fields = Fields(user="author", text="body", time="created_utc")
    options = EncodingOptions(min_tokens=1, tokens_per_user=int(sys.argv[3]))
    done = build_store(find_sources([sys.argv[1]]), sys.argv[2], Preparation(fields=fields, encoding=options))
    print(done.counts["users"]["train_tokens"] + done.counts["users"]["held_out_tokens"], "tokens")
"""


def family_memory(root: int) -> int:
    """Return the memory of a process and all its children in bytes. Shared pages are counted once."""
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        try:
            total += sum(
                int(line.split()[1]) << 10
                for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
                if line.startswith("Pss:")
            )
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += [int(child) for child in (task / "children").read_text().split()]
        except OSError:
            continue
    return total


def timed(command: list[str]) -> tuple[float, float, int]:
    """Run a command; return its seconds, its processor seconds over all cores, and its peak memory in bytes."""
    began, spent, peak = time.perf_counter(), processor_seconds(), 0
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL)
    done = threading.Event()

    def watch() -> None:
        """Read the memory of the command once a second until it has ended."""
        nonlocal peak
        while not done.wait(1.0):
            peak = max(peak, family_memory(process.pid))

    watcher = threading.Thread(target=watch)
    watcher.start()
    process.wait()
    done.set()
    watcher.join()
    if process.returncode:
        raise SystemExit(f"{command[1]} failed with {process.returncode}")
    return time.perf_counter() - began, processor_seconds() - spent, peak


def processor_seconds() -> float:
    """Return the processor seconds of all child processes that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def main(path: str, only_ours: bool) -> None:
    """Run the programs on a file and print their speed, memory and ratio."""
    megabytes = os.path.getsize(path) / 1e6
    with tempfile.TemporaryDirectory(dir=os.path.dirname(os.path.abspath(path))) as folder:
        script = Path(folder) / "ours.py"
        script.write_text(OURS)
        _read_once(path)
        first = _ours(script, path, folder, megabytes)
        if only_ours:
            return
        baseline = Path(__file__).with_name("corpus_baseline.py")
        slow, theirs, heavy = timed([sys.executable, str(baseline), path, f"{folder}/plain", str(CAP)])
        _print("pandas and re", megabytes, slow, theirs, heavy)
        again = _ours(script, path, folder, megabytes)
        seconds, ours = ((a + b) / 2 for a, b in zip(first, again, strict=True))
        cores = os.cpu_count() or 1
        print(
            f"ratio: {slow / seconds:.2f}; with {cores} cores to itself, by processor time: {theirs / (ours / cores):.2f}"
        )


def _read_once(path: str) -> None:
    """Read a file, so that it is in the page cache."""
    with open(path, "rb") as file:
        while file.read(1 << 24):
            pass


def _ours(script: Path, path: str, folder: str, megabytes: float) -> tuple[float, float]:
    """Run `prepare`, print its speed, and return its seconds and processor seconds."""
    seconds, processor, peak = timed([sys.executable, str(script), path, f"{folder}/store", str(CAP)])
    _print("prepare", megabytes, seconds, processor, peak)
    shutil.rmtree(f"{folder}/store")
    return seconds, processor


def _print(name: str, megabytes: float, seconds: float, processor: float, peak: int) -> None:
    """Print the speed, the processor seconds and the peak memory of one program."""
    rate = megabytes / seconds
    print(f"{name}: {seconds:.1f} s, {rate:.1f} MB/s, processor {processor:.1f} s, peak {peak >> 20} MiB", flush=True)


if __name__ == "__main__":
    main(sys.argv[1], "--ours" in sys.argv)
