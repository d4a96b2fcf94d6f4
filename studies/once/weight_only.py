"""Weight-only 4-bit products of public kernels beside ours, on one GPU: the linear layers of a block of
Qwen2.5-7B at a few numbers of rows of x.

    python weight_only.py OUT.json            everything, within LIMIT seconds (environment; default 145)
    python weight_only.py --child NAME DIR    one of CHILDREN (started by the above)
    python weight_only.py --compile DIR       compile, with others, what gemlite's autotuners will ask for

Every peer runs in a process of its own. First all of them prepare (compile, make weights) at the same
time; then they measure one after the other, while the GPU does nothing else.
"""
import itertools
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import time
import traceback
from pathlib import Path

LAYERS = {"qkv": (4608, 3584), "o": (3584, 3584), "gate_up": (37888, 3584), "down": (3584, 18944)}
ROWS = (1, 8, 32, 128)
# In the order in which they measure; for each how many seconds it may take at most.
CHILDREN = {
    "ours": 30,
    "humming-nvfp4": 25,
    "gemlite-int4-h100cfg": 25,
    "gemlite-mxfp4-tuned": 40,
    "gemlite-int4-tuned": 40,
    "gemlite-int4-g128-h100cfg": 20,
    "gemlite-nvfp4": 10,
}
TUNED = ("gemlite-mxfp4-tuned", "gemlite-int4-tuned")
DEVICE = os.environ.get("PEERS_DEVICE", "cuda:0")   # another one is for trying out parts of this without a GPU
START = float(os.environ.get("PEERS_START", time.time()))
LIMIT = float(os.environ.get("LIMIT", 145))
PREPARE = float(os.environ.get("PREPARE", 80))      # seconds until which preparing has to be done


def say(*words):
    print(f"[{time.time() - START:6.1f} s]", *words, flush=True)


# --------------------------------------------------------------------------------------------------
# Weights, the same in all processes

def copies_of(shape):
    """So many that together, at 4.5 bits a weight, they take 256 MB: well beyond the L2 cache (60 MB)."""
    return max(3, math.ceil(256e6 / (math.prod(shape) * 9 / 16)))


def bfloat16_weight(name):
    import torch
    generator = torch.Generator(DEVICE).manual_seed(list(LAYERS).index(name))
    return torch.randn(LAYERS[name], generator=generator, device=DEVICE, dtype=torch.bfloat16) * 0.02


def codes_of(packed):
    """uint8 [out, in/2], even index in the low nibble -> codes uint8 [out, in]."""
    import torch
    return torch.stack([packed & 15, packed >> 4], -1).flatten(1)


def e2m1(codes):
    import torch
    values = torch.tensor([0, .5, 1, 1.5, 2, 3, 4, 6, 0, -.5, -1, -1.5, -2, -3, -4, -6], device=DEVICE)
    return values[codes.int()]


def bits(tensors, shape):
    return 8 * sum(t.numel() * t.element_size() for t in tensors) / math.prod(shape)


# --------------------------------------------------------------------------------------------------
# Measuring

class Measured:
    """What a child has measured, written to its file after each row."""

    def __init__(self, name, folder):
        self.name, self.folder = name, Path(folder)
        self.rows, self.notes = [], {}

    def write(self):
        path = self.folder / f"{self.name}.json"
        path.with_suffix(".tmp").write_text(json.dumps({"rows": self.rows, "notes": self.notes}))
        path.with_suffix(".tmp").rename(path)

    def wait(self):
        """Until it is this process's turn."""
        import torch
        torch.cuda.synchronize()
        self.write()
        (self.folder / f"{self.name}.ready").touch()
        say(self.name, "is ready")
        while not (self.folder / f"{self.name}.go").exists():
            time.sleep(0.02)

    def row(self, what, layer, rows, calls, x, weight):
        """calls: a function of x for each copy of the layer; weight: its exact values, float32."""
        import torch
        y = calls[0](x)
        expected = x.float() @ weight.T
        error = ((y.float() - expected).norm() / expected.norm()).item()
        last = calls[-1](x)
        apart = ((last.float() - expected).norm() / expected.norm()).item()
        times = seconds_of(calls, x)
        row = {"what": what, "layer": layer, "rows": rows, "us": 1e6 * statistics.median(times),
               "us_min": 1e6 * min(times), "us_max": 1e6 * max(times), "error": max(error, apart)}
        self.rows.append(row)
        self.write()
        say(f"{what:26} {layer:8} x {rows:4}: {row['us']:8.2f} us  ({row['us_min']:.2f}..{row['us_max']:.2f}),"
            f" relative error {row['error']:.1e}")
        torch.cuda.empty_cache()


def seconds_of(calls, x, target=0.008, replays=11):
    """Seconds a call, of each of `replays` replays of a CUDA graph of many rounds over all copies.

    All results of a round are alive at once, as in a model's layers.
    """
    import torch

    def record(rounds):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(rounds):
                results = [call(x) for call in calls]
                del results
        return graph

    def replay(graph):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1e3

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for call in calls:
            call(x)
    torch.cuda.synchronize()
    graph = record(1)
    replay(graph)
    once = min(replay(graph) for _ in range(3))
    rounds = max(2, min(math.ceil(target / once), 2500 // len(calls)))
    graph = record(rounds)
    replay(graph)
    replay(graph)
    return [replay(graph) / (rounds * len(calls)) for _ in range(replays)]


def inputs(columns):
    """{rows: x}"""
    import torch
    generator = torch.Generator(DEVICE).manual_seed(9)
    return {M: torch.randn(M, columns, generator=generator, device=DEVICE, dtype=torch.bfloat16)
            for M in ROWS}


def control(measured):
    """cuBLAS once more in this process, so that a GPU in another state shows."""
    import torch.nn.functional as F
    weight = bfloat16_weight("o")
    copies = [weight.clone() for _ in range(copies_of(LAYERS["o"]))]
    x = inputs(weight.shape[1])[8]
    times = seconds_of([lambda x, w=w: F.linear(x, w) for w in copies], x)
    measured.notes["control: us of F.linear, o x 8"] = 1e6 * statistics.median(times)
    measured.write()


# --------------------------------------------------------------------------------------------------
# Ours, and cuBLAS in bfloat16

def ours(measured):
    import torch
    import torch.nn.functional as F
    import fp4_kernels
    import qerl
    from harness import fast
    tiled, dense = {}, {}
    for name, shape in LAYERS.items():
        weight = bfloat16_weight(name)
        first = fast.FORMATS["nvfp4"].tile(*qerl.quantize_nvfp4(weight))
        tiled[name] = [fp4_kernels.TiledWeight(*(t.clone() for t in (first.words, first.scales, first.out_scale)))
                       for _ in range(copies_of(shape))]
        dense[name] = [weight.clone() for _ in tiled[name]]
        measured.notes[f"bits a weight, {name}"] = bits([first.words, first.scales, first.out_scale], shape)
        for x in inputs(shape[1]).values():
            tiled[name][0].multiply(fp4_kernels.interleave(x).contiguous())
            F.linear(x, weight)
    measured.wait()
    for name, shape in LAYERS.items():
        exact = tiled[name][0].dequantize(torch.float32)
        for M, x in inputs(shape[1]).items():
            order = fp4_kernels.interleave(torch.arange(shape[1], device=DEVICE))
            calls = [w.multiply for w in tiled[name]]
            placed = x[:, order].contiguous()            # the kernels before a layer write x so
            # Measured.row compares with x Ŵᵀ: of both the columns are permuted alike.
            measured.row("ours", name, M, calls, placed, exact[:, order])
        exact = dense[name][0].float()
        for M, x in inputs(shape[1]).items():
            measured.row("bf16 F.linear", name, M, [lambda x, w=w: F.linear(x, w) for w in dense[name]], x, exact)


# --------------------------------------------------------------------------------------------------
# Humming (https://github.com/vllm-project/humming), NVFP4 weights as ModelOpt stores them

def humming(measured):
    import copy
    from concurrent.futures import ThreadPoolExecutor
    import torch
    import qerl
    try:
        import humming as package
        from humming.utils.cuda import find_all_cuda_paths
        for found in find_all_cuda_paths():
            say("CUDA:", {k: found[k] for k in ("source", "path", "major", "minor", "include_paths")},
                sorted(found["binaries"]))
        from humming.jit.compiler import NVRTCCompiler
        say("NVRTC", NVRTCCompiler._get_version(), [str(p) for p in NVRTCCompiler._get_include_dirs()])
    except Exception:
        traceback.print_exc()
        say("NVRTC cannot be used: nvcc instead")
        os.environ["HUMMING_COMPILER"] = "nvcc"
        import humming as package
    from humming.kernel.humming import HummingKernel
    from humming.layer import HummingLayer
    from humming.tune import get_heuristics_config
    measured.notes["version"] = package.__version__

    def layer_of(name):
        packed, scale, global_scale = qerl.quantize_nvfp4(bfloat16_weight(name))
        layer = HummingLayer(
            shape_n=LAYERS[name][0], shape_k=LAYERS[name][1], torch_dtype=torch.bfloat16,
            weight_config={"quant_method": "modelopt", "quant_algo": "NVFP4"}).cuda()
        layer.load_from_tensors({"weight": packed, "weight_scale": scale, "weight_scale_2": 1 / global_scale})
        layer.transform()
        return layer

    try:
        layers = {"o": layer_of("o")}
    except Exception:
        if os.environ.get("HUMMING_COMPILER") == "nvcc":
            raise
        traceback.print_exc()
        say("NVRTC failed: nvcc instead")
        os.environ["HUMMING_COMPILER"] = "nvcc"
        layers = {"o": layer_of("o")}
    layers |= {name: layer_of(name) for name in LAYERS if name != "o"}
    # Its own choice for so many rows: what it takes by default, without compiling the choices for all
    # other numbers of rows.
    tuning = {}
    for name, layer in layers.items():
        for M in ROWS:
            config = get_heuristics_config(layer.humming_config, shape_m=M, device=0)
            tuning[name, M] = json.dumps(config)
            say("humming", name, M, tuning[name, M])

    def compile_one(key):
        with torch.cuda.device(0):
            HummingKernel.prepare_kernels(layers[key[0]].humming_config.to_str(), None, tuning[key], 0)

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(compile_one, tuning))
    copies = {}
    for name, layer in layers.items():
        copies[name] = [copy.deepcopy(layer) for _ in range(copies_of(LAYERS[name]))]
        stored = [p for n, p in layer.named_parameters()]
        measured.notes[f"bits a weight, {name}"] = bits(stored, LAYERS[name])
        measured.notes[f"tensors, {name}"] = [f"{n} {tuple(p.shape)} {p.dtype}" for n, p in layer.named_parameters()]
        for M, x in inputs(LAYERS[name][1]).items():
            layer(x, tuning_config=tuning[name, M])
    measured.notes["tuning"] = {f"{name} x {M}": json.loads(t) for (name, M), t in tuning.items()}
    measured.notes["compiler"] = os.environ.get("HUMMING_COMPILER", "nvrtc")
    measured.wait()
    for name in LAYERS:
        packed, scale, global_scale = qerl.quantize_nvfp4(bfloat16_weight(name))
        exact = e2m1(codes_of(packed)) * (scale.float() / global_scale).repeat_interleave(16, 1)
        for M, x in inputs(LAYERS[name][1]).items():
            def call(x, layer, config=tuning[name, M]):
                return layer(x, tuning_config=config)
            calls = [lambda x, layer=layer: call(x, layer) for layer in copies[name]]
            try:
                measured.row(measured.name, name, M, calls, x, exact)
            except Exception:
                traceback.print_exc()
    control(measured)


# --------------------------------------------------------------------------------------------------
# gemlite (https://github.com/dropbox/gemlite)

def gemlite_layer(kind, name, empty=False):
    """(a layer, a function that gives its exact weight in float32); empty: all codes are zero."""
    import torch
    import qerl
    from gemlite import helper
    out, columns = LAYERS[name]
    if empty:
        codes = torch.zeros(out, columns, dtype=torch.uint8, device=DEVICE)
        if "mxfp4" in kind:
            scale = torch.full((out, columns // 32), 127, dtype=torch.uint8, device=DEVICE)
            return helper.A16W4_MXFP(device=DEVICE, dtype=torch.bfloat16).from_weights(
                codes, scale.view(torch.float8_e8m0fnu)), None
        scale = torch.ones(out * columns // 64, 1, dtype=torch.bfloat16, device=DEVICE)
        return helper.A16W4_HQQ_INT(device=DEVICE, dtype=torch.bfloat16).from_weights(
            codes, scale, scale), None
    weight = bfloat16_weight(name)
    if kind.startswith("gemlite-int4"):
        group = 128 if "g128" in kind else 64
        groups = weight.float().view(-1, group)
        low, high = groups.aminmax(dim=1, keepdim=True)
        scale = ((high - low) / 15).bfloat16()
        zero = (-low / scale.float()).bfloat16()
        codes = (groups / scale.float() + zero.float()).round().clamp(0, 15).to(torch.uint8)
        layer = helper.A16W4_HQQ_INT(device=DEVICE, dtype=torch.bfloat16).from_weights(
            codes.view(out, columns), scale, zero)

        def exact():
            offset = (-zero.float() * scale.float()).bfloat16().float()          # as gemlite keeps it
            return (codes.float() * scale.float() + offset).view(out, columns)
    elif "mxfp4" in kind:
        packed, scale, _ = qerl.quantize_mxfp4(weight)
        layer = helper.A16W4_MXFP(device=DEVICE, dtype=torch.bfloat16).from_weights(
            codes_of(packed), scale.contiguous().view(torch.float8_e8m0fnu))

        def exact():
            return e2m1(codes_of(packed)) * torch.exp2(scale.float() - 127).repeat_interleave(32, 1)
    else:
        packed, scale, global_scale = qerl.quantize_nvfp4(weight)
        layer = helper.A16W4_NVFP(device=DEVICE, dtype=torch.bfloat16).from_weights(
            codes_of(packed), scales=scale, meta_scale=global_scale)

        def exact():
            return e2m1(codes_of(packed)) * (scale.float() / global_scale).repeat_interleave(16, 1)
    return layer, exact


def gemlite_configs(kind):
    """Its file of tuned configs for the H100, which has this block's shapes, or its autotuner."""
    import gemlite
    if "h100cfg" in kind:
        path = Path(gemlite.__file__).parent / "configs/h100.json"
        assert gemlite.load_config(str(path)), path
    else:
        gemlite.reset_config()
    return gemlite


def gemlite(measured):
    import copy
    import torch
    from triton.runtime.autotuner import Autotuner
    from triton.testing import do_bench
    package = gemlite_configs(measured.name)
    measured.notes["version"] = package.__version__
    # The autotuner's own way to time (with the L2 cache cleared), but 10 ms a config instead of 125.
    Autotuner.do_bench = property(
        lambda self: lambda call, quantiles: do_bench(call, warmup=2, rep=8, quantiles=quantiles))
    bench = Autotuner._bench

    def bench_or_skip(self, *args, config, **meta):          # a config that does not compile is no choice
        try:
            return bench(self, *args, config=config, **meta)
        except RuntimeError as error:
            say(config, "fails:", str(error)[:100])
            return [float("inf")] * 3

    if measured.name in TUNED:
        Autotuner._bench = bench_or_skip
    layers = {name: gemlite_layer(measured.name, name) for name in LAYERS}
    for name, (layer, _) in layers.items():
        stored = [layer.W_q, layer.scales, layer.zeros]
        measured.notes[f"bits a weight, {name}"] = bits(stored, LAYERS[name])
    if "h100cfg" in measured.name:                           # else the autotuner times, at its turn
        for name, (layer, _) in layers.items():
            for M, x in inputs(LAYERS[name][1]).items():
                layer(x)
                torch.cuda.synchronize()
    if "nvfp4" in measured.name:                             # does it compile at all?
        layers["o"][0](inputs(3584)[8])
    measured.wait()
    for name, (layer, exact) in layers.items():
        copies = [copy.deepcopy(layer) for _ in range(copies_of(LAYERS[name]))]
        for other in copies:                                 # a deep copy's forward is the first's method
            other.forward = other.forward_auto_no_warmup
        weight = exact()
        for M, x in inputs(LAYERS[name][1]).items():
            begin = time.time()
            try:
                copies[0](x)
                torch.cuda.synchronize()
                if time.time() - begin > 0.2:
                    say(f"autotuned in {time.time() - begin:.1f} s")
                measured.row(measured.name, name, M, copies, x, weight)
            except Exception:
                traceback.print_exc()
        del copies, weight
    from gemlite.core import GEMLITE_TRITON_MAPPING
    for matmul, kernel in GEMLITE_TRITON_MAPPING.items():
        for function in kernel.kernel:
            for key, config in getattr(function, "cache", {}).items():
                measured.notes[f"config, {matmul}, {key[:3]}"] = str(config)
    control(measured)


def compile_share(folder):
    """Fill Triton's cache with what the autotuners will ask for, without running it. Several processes
    do this at once: each task is of the one that first makes its file.
    """
    import torch
    from triton.runtime.autotuner import Autotuner

    def compile_only(self, *args, config, **meta):
        try:
            self.fn.run(*args, **{**meta, **config.all_kwargs(), "warmup": True})
        except Exception as error:
            print(config, type(error).__name__, str(error)[:200], flush=True)
            return [float("inf")] * 3
        return [1.0] * 3

    Autotuner._bench = compile_only
    for kind, M, name in itertools.product(TUNED, ROWS, LAYERS):
        try:
            (Path(folder) / f"{kind}-{name}-{M}.task").touch(exist_ok=False)
        except FileExistsError:
            continue
        begin = time.time()
        gemlite_configs(kind)
        layer, _ = gemlite_layer(kind, name, empty=True)
        try:
            layer(torch.zeros(M, LAYERS[name][1], device=DEVICE, dtype=torch.bfloat16))
            torch.cuda.synchronize()
        except Exception as error:
            print(kind, name, M, type(error).__name__, str(error)[:300], flush=True)
        del layer
        torch.cuda.empty_cache()
        say(f"compiled {kind} {name} x {M} in {time.time() - begin:.1f} s")


def child(name, folder):
    import torch
    torch.set_grad_enabled(False)
    measured = Measured(name, folder)
    run = {"ours": ours, "humming-nvfp4": humming}.get(name, gemlite)
    try:
        run(measured)
    except Exception as error:
        traceback.print_exc()
        measured.notes["failed"] = f"{type(error).__name__}: {str(error)[:300]}"
    measured.write()


# --------------------------------------------------------------------------------------------------
# All of them

def start(folder, label, *arguments):
    log = open(folder / f"{label}.log", "w")
    environment = {**os.environ, "PEERS_START": str(START)}
    if label.startswith("compile"):
        environment["OMP_NUM_THREADS"] = "1"
    return subprocess.Popen([sys.executable, "-u", os.path.abspath(__file__), *map(str, arguments)], stdout=log,
                            stderr=subprocess.STDOUT, stdin=subprocess.DEVNULL, env=environment,
                            start_new_session=True)


def stop(process):
    if process.poll() is None:
        try:
            os.killpg(process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        process.wait()


def tail(path, lines):
    return "\n".join("    | " + line[:180] for line in path.read_text(errors="replace").splitlines()[-lines:])


def device_name():
    import torch
    return torch.cuda.get_device_name() if torch.cuda.is_available() else "no GPU"


def report(folder, out, names):
    """Print the tables and write everything to `out`."""
    import torch
    rows, notes = [], {}
    for name in names:
        path = folder / f"{name}.json"
        if path.exists():
            found = json.loads(path.read_text())
            rows += found["rows"]
            notes[name] = found["notes"]
        else:
            notes[name] = {"failed": "it wrote nothing; see its log"}
    us = {(row["what"], row["layer"], row["rows"]): row["us"] for row in rows}
    whats = list(dict.fromkeys(row["what"] for row in rows))
    blocks = []
    for M in ROWS:
        print(f"\nrows of x: {M}; microseconds a layer (x: times ours)")
        print(f"{'':28}" + "".join(f"{name:>16}" for name in (*LAYERS, "block")) + "   error")
        for what in whats:
            times = {name: us.get((what, name, M)) for name in LAYERS}
            times["block"] = None if None in times.values() else sum(times.values())
            base = {name: us.get(("ours", name, M)) for name in LAYERS}
            base["block"] = None if None in base.values() else sum(base.values())
            cells = []
            for name, t in times.items():
                ratio = f" {t / base[name]:4.2f}x" if t and base[name] else ""
                cells.append(f"{f'{t:.1f}' if t else '-'}{ratio}")
                blocks.append({"what": what, "rows": M, "layer": name, "us": t,
                               "ratio_to_ours": t / base[name] if t and base[name] else None})
            errors = [row["error"] for row in rows if row["what"] == what and row["rows"] == M]
            print(f"{what:28}" + "".join(f"{cell:>16}" for cell in cells) + f"   {max(errors, default=math.nan):.0e}")
    print()
    for name, found in notes.items():
        stored = [f"{v:.3f}" for k, v in found.items() if k.startswith("bits")]
        print(f"{name}: bits a weight {' '.join(stored) or '-'}; version {found.get('version', '-')}; "
              f"{ {k: v for k, v in found.items() if k in ('failed', 'compiler') or k.startswith('control')} }")
    result = {
        "device": device_name(), "torch": torch.__version__, "layers": LAYERS,
        "copies": {name: copies_of(shape) for name, shape in LAYERS.items()},
        "seconds": time.time() - START, "rows": rows, "table": blocks, "notes": notes}
    temporary = Path(f"{out}.tmp")
    temporary.write_text(json.dumps(result, indent=1))
    temporary.rename(out)


def main(out):
    folder = Path(out).resolve().parent / "peers_logs"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.iterdir():
        old.unlink()
    names = [name for name in CHILDREN if not os.environ.get("ONLY") or name in os.environ["ONLY"].split(",")]
    processes = {name: start(folder, name, "--child", name, folder) for name in names}
    shares = max(1, min(14, (os.cpu_count() or 2) - 2)) if set(names) & set(TUNED) else 0
    workers = [start(folder, f"compile{i}", "--compile", folder) for i in range(shares)]
    say("started", *names, f"and {shares} that compile")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))
    import torch                                             # takes seconds, which `report` has not
    try:
        say("torch", torch.__version__, device_name())
        def preparing(name):
            return processes[name].poll() is None and not (folder / f"{name}.ready").exists()
        while time.time() - START < PREPARE:
            busy = [name for name in names if preparing(name)] + [w.pid for w in workers if w.poll() is None]
            if not busy:
                break
            time.sleep(0.1)
        say("prepared;", sum(w.poll() is None for w in workers), "compilers are stopped, and",
            [name for name in names if preparing(name)])
        for worker in workers:
            stop(worker)
        for name in names:
            if preparing(name):
                stop(processes[name])
        for name in names:
            if not (folder / f"{name}.ready").exists():
                say(f"{name} could not start; its log ends:\n{tail(folder / f'{name}.log', 12)}")
                continue
            if time.time() - START > LIMIT - 4:
                say(name, "is left out: no time")
                continue
            say(name, "measures")
            (folder / f"{name}.go").touch()
            end = min(time.time() + CHILDREN[name], START + LIMIT)
            while processes[name].poll() is None and time.time() < end:
                time.sleep(0.02)
            if processes[name].poll() is None:
                say(name, "is stopped: too slow")
            stop(processes[name])
            if processes[name].returncode or "Traceback" in (folder / f"{name}.log").read_text(errors="replace"):
                say(f"exit status {processes[name].returncode}; its log ends:\n{tail(folder / f'{name}.log', 12)}")
    finally:
        for process in [*processes.values(), *workers]:
            stop(process)
        report(folder, out, names)
    say("written to", out)


if __name__ == "__main__":
    if sys.argv[1] == "--child":
        child(*sys.argv[2:])
    elif sys.argv[1] == "--compile":
        compile_share(sys.argv[2])
    else:
        main(sys.argv[1])
