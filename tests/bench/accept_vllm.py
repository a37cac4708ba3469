"""Serve a checkpoint with vLLM's CPU build on loopback and let `quantkit acceptance` judge it.

    python tests/bench/accept_vllm.py INT8_CHECKPOINT -o DIR [--baseline BASELINE] [--soak HOURS]

The server runs in its own environment (`.peers/vllm`, see `make interop-acceptance`); it is killed and restarted on the
way, by this script as the restart command. Exit code of the acceptance; the server's log stands beside the report.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import common
import peers
import psutil

HERE = Path(__file__).resolve()
READY_S = 900


def free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
        return port


def start(state: Path) -> None:
    """Start the server that the state file describes and note its process."""
    found = json.loads(state.read_text())
    environment = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "OMP_NUM_THREADS": str(os.cpu_count()),
        "NO_COLOR": "1",
    }
    with Path(found["log"]).open("ab") as log:
        server = subprocess.Popen(
            found["command"], env=environment, stdout=log, stderr=log, stdin=subprocess.DEVNULL, start_new_session=True
        )
    state.write_text(json.dumps({**found, "pid": server.pid}))


def stop(state: Path) -> None:
    """Kill the server and its workers at once, as a crash would, and wait until its port is free."""
    found = json.loads(state.read_text())
    with contextlib.suppress(ProcessLookupError):
        os.killpg(found["pid"], signal.SIGKILL)
    deadline = time.monotonic() + 60
    while answers(found["port"]) and time.monotonic() < deadline:
        time.sleep(0.2)


def answers(port: int) -> bool:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def wait(state: Path) -> None:
    found = json.loads(state.read_text())
    deadline = time.monotonic() + READY_S
    while not answers(found["port"]):
        if not psutil.pid_exists(found["pid"]) or psutil.Process(found["pid"]).status() == psutil.STATUS_ZOMBIE:
            raise SystemExit(f"error: the server ended; its log: {found['log']}")
        if time.monotonic() > deadline:
            raise SystemExit(f"error: the server is not ready after {READY_S} s; its log: {found['log']}")
        time.sleep(1)


def record(out: Path) -> Path:
    """The checks of an acceptance as a result of the benches, without the evidence."""
    found = json.loads((out / "acceptance.json").read_text())
    report = common.Report("acceptance_vllm_cpu", False, found["settings"])
    report.data["versions"] |= peers.versions("vllm")
    kept = ("name", "dimension", "status", "findings", "measured")
    report.data["checks"] = [{key: check[key] for key in kept} for check in found["checks"]]
    return report.write()


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("checkpoint", type=Path, nargs="?")
    parser.add_argument("-o", "--out", type=Path)
    parser.add_argument("--baseline", type=Path)
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--soak", default="0.05")
    parser.add_argument("--only", action="append", default=[], help="dimension; repeatable")
    parser.add_argument("--restart", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.restart:
        stop(args.restart)
        start(args.restart)
        return 0
    if args.checkpoint is None or args.out is None:
        parser.error("give a checkpoint and -o")
    args.out.mkdir(parents=True, exist_ok=True)
    port, state = free_port(), args.out / "server.json"
    # not `vllm serve`: that asks for the version of a package that the CPU build has under another name
    serve = [str(peers.python_of("vllm")), "-m", "vllm.entrypoints.openai.api_server", "--model", str(args.checkpoint)]
    serve += ["--host", "127.0.0.1", "--port", str(port)]
    serve += ["--served-model-name", "candidate", "--dtype", "bfloat16", "--max-model-len", str(args.context)]
    serve += ["--max-num-seqs", "8", "--enforce-eager", "--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    state.write_text(json.dumps({"command": serve, "port": port, "log": str(args.out / "server.log")}))
    start(state)
    try:
        wait(state)
        command = [sys.executable, "-m", "quantkit", "acceptance", "--endpoint", f"http://127.0.0.1:{port}/v1"]
        command += ["-o", str(args.out), "--thresholds", str(HERE.with_name("acceptance_cpu.yaml"))]
        command += [
            "--soak",
            args.soak,
            "--restart-command",
            shlex.join([sys.executable, str(HERE), "--restart", str(state)]),
        ]
        command += ["--pid", str(json.loads(state.read_text())["pid"])]
        command += ["--baseline", str(args.baseline)] if args.baseline else []
        command += [part for name in args.only for part in ("--only", name)]
        code = subprocess.run(command, check=False).returncode
        if not args.only and code in (0, 4):
            record(args.out)
        return code
    finally:
        stop(state)


if __name__ == "__main__":
    sys.exit(main())
