# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of results in README.md and docs/performance.md from benchmarks/records.

A table stands between `<!-- NAME:begin -->` and `<!-- NAME:end -->`. --check only says if one is
stale; --pictures draws those of docs/performance.md too.
"""

import json
import statistics
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parent.parent
RECORDS = ROOT / "benchmarks" / "records"
IMAGES = ROOT / "docs" / "images"
PICTURES = {
    "gpt-oss-120b:256:1:1500:fp8": "roofline_gpt_oss_256.png",
    "llama-3.1-8b-fp8:512:1:1500:fp8": "roofline_llama_fp8_512.png",
    "llama-3.1-8b:256:1:1500": "roofline_llama_256.png",
    "deepseek-v3:128:1:1250:7": "roofline_deepseek_128.png",
}
"""Steps of the roofline record that are drawn."""
PAGES = (ROOT / "README.md", ROOT / "docs" / "performance.md")

Record = dict[str, Any]


class Records:
    """The newest record of each name, and how a page links to it."""

    def __init__(self, page: Path) -> None:
        self._page = page

    def load(self, name: str) -> tuple[Record, str]:
        path = max(RECORDS.glob(f"{name}_????-??-??.json"))
        up = "../" if self._page.parent != ROOT else ""
        link = f"[record]({up}{path.relative_to(ROOT)})"
        record: Record = json.loads(path.read_text())
        return record, link


def make_results(records: Records) -> list[str]:
    """The README's table."""
    lines = ["| what | Pelton | beside | ratio | record |", "|---|---|---|---|---|"]
    lines += _gpu_lines(records)
    lines += _arrival_lines(records)
    lines += _layout_lines(records)
    lines += _cpu_lines(records)
    lines += _own_lines(records)
    return lines


def _gpu_lines(records: Records) -> list[str]:
    rows = (
        ("llama-3.1-8b_1xh100", "offline", "vllm", "Llama-3.1-8B geometry, bf16"),
        ("llama-3.1-8b_1xh200", "offline-beside-vllm", "vllm", "Llama-3.1-8B geometry, bf16"),
        (
            "llama-3.1-8b-fp8_1xh200",
            "offline-beside-vllm",
            "vllm",
            "Llama-3.1-8B geometry, FP8 weights and KV",
        ),
        (
            "gpt-oss-120b_1xh200",
            "offline-79gib-beside-vllm",
            "vllm",
            "GPT-OSS-120B geometry, MXFP4, FP8 KV",
        ),
        (
            "deepseek-v3_1xh200",
            "offline-7layers",
            "vllm-7layers",
            "DeepSeek-V3 geometry, 7 layers, FP8",
        ),
    )
    return [
        line
        for name, run, peer, label in rows
        for line in _beside_vllm(records, f"{name}_{run}", f"{name}_{peer}", label)
    ]


def _beside_vllm(records: Records, own: str, peer: str, label: str) -> list[str]:
    """Our median beside the peer's fastest repeat: its first one may compile."""
    ours, link = records.load(own)
    vllm, peer_link = records.load(peer)
    card = ours["machine"]["gpus"][0]["name"]
    peers: dict[str, float] = {}
    for point in vllm["points"]:
        key = f"{point['requests']}:{point['input_len']}:{point['output_len']}"
        peers[key] = max(peers.get(key, 0.0), point["output_tokens_per_s"])
    lines = []
    for point in ours["points"]:
        theirs = peers[point["point"]]
        mine = point["output_tokens_per_s"]
        lines.append(
            f"| {card}, {label}, random weights,"
            f" {point['point']} (requests:input:output) | {mine:,.1f} tok/s"
            f" | vLLM 0.26 {theirs:,.1f} | {mine / theirs:.2f}x | {link}, {peer_link} |"
        )
    return lines


def _layout_lines(records: Records) -> list[str]:
    """The highest rate that prefill and decode apart hold beside what mixed workers do."""
    record, link = records.load("gpt-oss-20b_2xh200_disaggregation")
    held = {
        (found["layout"], limit): point["rate_per_s"]
        for found in record["layouts"]
        for point in found["points"]
        for limit in point["holds_at_tpot_ms"]
    }
    return [
        f"| 2 x NVIDIA H200, GPT-OSS-20B geometry, random weights, requests/s at a TTFT within"
        f" {record['ttft_ms'] / 1e3:g} s and a TPOT within {limit:g} ms (p99)"
        f" | {held['apart', limit]:g} with prefill and decode apart"
        f" | two mixed workers {held['mixed', limit]:g}"
        f" | {held['apart', limit] / held['mixed', limit]:.2f}x | {link} |"
        for limit in (8.0, 20.0)
    ]


def _cpu_lines(records: Records) -> list[str]:
    record, link = records.load("smollm2_cpu_peers")
    rows = (
        ("decode", 16, "transformers bf16"),
        ("decode", 16, "llama.cpp Q4_1"),
        ("decode", 1, "transformers bf16"),
        ("prefill", 1, "transformers bf16"),
        ("prefill", 16, "transformers bf16"),
    )
    threads = record["threads"]
    lines = []
    for phase, num_requests, peer in rows:
        ours = _rates(record, phase, num_requests)
        best = max((name for name in ours if name.startswith("pelton")), key=ours.__getitem__)
        ratio = ours[best] / ours[peer]
        lines.append(
            f"| CPU, SmolLM2, {threads} threads, {phase}, {num_requests}"
            f" request{'s' if num_requests > 1 else ''} at once"
            f" | {ours[best]:,.0f} tok/s ({best.removeprefix('pelton ')})"
            f" | {peer} {ours[peer]:,.0f} | {ratio:.2f}x | {link} |"
        )
    return lines


def _rates(record: Record, phase: str, num_requests: int) -> dict[str, float]:
    return {
        item["peer"]: statistics.median(item[f"{phase}_tokens_per_s"])
        for item in record["figures"]
        if item["num_requests"] == num_requests
    }


def _arrival_lines(records: Records) -> list[str]:
    record, link = records.load("arrivals_1xh200")
    return [
        f"| {record['hardware']['name']}, {point['model']} geometry, random weights, pause of"
        f" {point['num_decoding']} requests that decode when a prompt of {point['prompt_len']}"
        f" tokens comes | {point['graphs']['pause_ms']:.1f} ms | the same kernel by kernel"
        f" {point['launched']['pause_ms']:.1f}"
        f" | {point['launched']['pause_ms'] / point['graphs']['pause_ms']:.2f}x | {link} |"
        for point in record["points"]
        if (point["num_decoding"], point["prompt_len"]) == (8, 128)
    ]


def _own_lines(records: Records) -> list[str]:
    scheduler, scheduler_link = records.load("scheduler_cpu")
    case = scheduler["cases"][0]
    frontend, frontend_link = records.load("frontend_cpu")
    best = max(frontend["streams"], key=lambda stream: stream["tokens_per_s"])
    startup, startup_link = records.load("smollm2_cpu_startup")
    ready_s = statistics.median(start["ready_s"] for start in startup["starts"])
    memory = statistics.median(sum(s["memory_bytes"].values()) for s in startup["starts"])
    requests = frontend["short_requests"]["requests_per_s"]
    return [
        f"| `Scheduler.plan` + `commit`, {case['num_requests']} running requests, one core"
        f" | {case['sum_p50_ms']:.2f} ms | | | {scheduler_link} |",
        f"| One frontend process on one core, {frontend['num_streams']} streams"
        f" | {best['tokens_per_s']:,.0f} tok/s in events of {best['tokens_per_event']:.0f}"
        f" | | | {frontend_link} |",
        f"| The same, short requests | {requests:,.0f}/s | | | {frontend_link} |",
        f"| `pelton serve smollm2` on a CPU: ready; memory of all processes"
        f" | {ready_s:.1f} s; {memory / 1e6:,.0f} MB | | | {startup_link} |",
    ]


def make_peers(records: Records) -> list[str]:
    """Every figure of the CPU comparison."""
    record, link = records.load("smollm2_cpu_peers")
    lines = [
        f"{record['machine']['cpu']}, {record['threads']} threads,"
        f" {record['prompt_tokens']}-token prompts, {record['output_tokens']} greedy tokens;"
        f" medians of {len(record['figures'][0]['decode_tokens_per_s'])} repeats"
        f" (lowest to highest), {link}.",
        "",
        "| peer | requests | prefill tok/s | decode tok/s |",
        "|---|---|---|---|",
    ]
    for item in record["figures"]:
        cells = [_spread(item[f"{phase}_tokens_per_s"]) for phase in ("prefill", "decode")]
        lines.append(f"| {item['peer']} | {item['num_requests']} | {cells[0]} | {cells[1]} |")
    return lines


def _spread(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f} ({min(values):,.0f} to {max(values):,.0f})"


def make_gpu(records: Records) -> list[str]:
    """Every point of the GPU runs."""
    lines = [
        "| model | requests:input:output | tok/s | decode only | prefill s | preempted | record |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in ("llama-3.1-8b", "smollm2-135m"):
        record, link = records.load(f"{name}_1xh100_offline")
        lines += [
            f"| {name} | {point['point']} | {_spread(point['repeats_tokens_per_s'])}"
            f" | {point['decode_tokens_per_s']:,.0f} | {point['prefill_s']:.2f}"
            f" | {point['preemptions']} | {link} |"
            for point in record["points"]
        ]
    return lines


def make_kernels(records: Records) -> list[str]:
    """Every case of the kernel bench."""
    record, link = records.load("kernels_1xh200")
    hardware = record["hardware"]
    lines = [
        f"{hardware['name']}: copy {hardware['memory_bytes_per_s'] / 1e12:.2f} TB/s, products"
        f" {hardware['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s in bf16 and"
        f" {hardware['fp8_flops_per_s'] / 1e12:,.0f} in FP8, {link}.",
        "",
        "| case | µs | GB/s | TFLOP/s | % of the floor |",
        "|---|---|---|---|---|",
    ]
    lines += [
        f"| {timing['case']} | {timing['median_us']:.1f} | {timing['gigabytes_per_s']:,.0f}"
        f" | {timing['teraflops_per_s']:.1f} | {timing['share_of_roofline']:.0%} |"
        for timing in record["timings"]
    ]
    return lines


def make_drafts(records: Records) -> list[str]:
    """What drafts cost when none is accepted."""
    record, link = records.load("deepseek-v3_1xh100_draft-cost")
    hardware = record["hardware"]
    lines = [
        f"{hardware['name']}: copy {hardware['memory_bytes_per_s'] / 1e12:.2f} TB/s, bf16 products"
        f" {hardware['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s, {link}.",
        "",
        "| drafts | requests | step ms | its floor ms | step, times that without drafts"
        " | floor, likewise | more than explained |",
        "|---|---|---|---|---|---|---|",
    ]
    lines += [
        f"| {point['num_drafts']} | {point['batch']} | {point['step']['median_ms']:.2f}"
        f" | {point['floor_ms']:.2f} | {point['ratio']:.2f} | {point['explained_ratio']:.2f}"
        f" | {point['excess']:.2f}x |"
        for point in record["points"]
    ]
    return lines


def make_arrivals(records: Records) -> list[str]:
    """A prompt that arrives while others decode."""
    record, link = records.load("arrivals_1xh200")
    hardware = record["hardware"]
    lines = [
        f"{hardware['name']}: copy {hardware['memory_bytes_per_s'] / 1e12:.2f} TB/s, bf16 products"
        f" {hardware['bf16_flops_per_s'] / 1e12:.0f} TFLOP/s, {link}.",
        "",
        "| model | decoding | prompt | time to first token, ms | kernel by kernel"
        " | pause of those that decode, ms | kernel by kernel |",
        "|---|---|---|---|---|---|---|",
    ]
    for point in record["points"]:
        graphs, launched = point["graphs"], point["launched"]
        cells = [f"{times['ttft_ms']:.1f}" for times in (graphs, launched)]
        cells += [
            "" if times["pause_ms"] is None else f"{times['pause_ms']:.1f}"
            for times in (graphs, launched)
        ]
        # Records of 9462faf and before have one prompt in each arrival.
        count = point.get("num_prompts", 1)
        prompt = f"{count} of {point['prompt_len']}" if count > 1 else point["prompt_len"]
        lines.append(
            f"| {point['model']} | {point['num_decoding']} | {prompt} | " + " | ".join(cells) + " |"
        )
    return lines


def make_experts(records: Records) -> list[str]:
    """Mixtures of experts at real geometry: memory, start and speed."""
    lines = [
        "| card | model | requests:input:output | tok/s | decode only | prefill s | peak GB | KV GB"
        " | mJ a token | ready s | record |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, label in (
        ("llama-3.1-8b_1xh200_offline-one-card", "H200 | llama-3.1-8b, bf16"),
        (
            "llama-3.1-8b-fp8_1xh200_offline-one-card",
            "H200 | llama-3.1-8b, FP8 weights and KV",
        ),
        ("gpt-oss-120b_1xh100_offline", "H100 | gpt-oss-120b"),
        (
            "gpt-oss-120b_1xh200_offline-79gib-beside-vllm",
            "H200, 79.1 GiB of it | gpt-oss-120b, FP8 KV",
        ),
        ("deepseek-v3_1xh100_offline-7layers", "H100 | deepseek-v3, 7 layers"),
        ("deepseek-v3_1xh200_offline-7layers-one-card", "H200 | deepseek-v3, 7 layers"),
    ):
        record, link = records.load(name)
        gigabytes = " | ".join(f"{record[key] / 1e9:.1f}" for key in ("peak_bytes", "kv_bytes"))
        lines += [
            f"| {label} | {point['point']} | {_spread(point['repeats_tokens_per_s'])}"
            f" | {point['decode_tokens_per_s']:,.0f} | {point['prefill_s']:.2f} | {gigabytes}"
            f" | {_millijoules(point)} | {record['ready_s']:.1f} | {link} |"
            for point in record["points"]
        ]
    return lines


def _millijoules(point: Record) -> str:
    """Of a token of the output, prompts and all. Records say a run's power since 72e0c6a."""
    watts = point.get("power_w")
    return f"{1000 * watts / point['output_tokens_per_s']:.0f}" if watts else ""


def make_gpu_transfers(records: Records) -> list[str]:
    """Blocks between two GPUs, by the blocks of a read."""
    runs = [records.load(f"kv-transfer_2xh200_one-kernel{run}") for run in ("", "-128")]
    heads = [f"{record['blocks_in_a_run']} blocks a read ({link})" for record, link in runs]
    lines = [f"| block | {heads[0]} | {heads[1]} |", "|---|---|---|"]
    for cases in zip(*(record["cases"] for record, _ in runs), strict=True):
        rates = [case["bytes_per_s"]["copy and check"] for case in cases]
        cells = [
            f"{statistics.median(r) / 1e9:.0f} ({min(r) / 1e9:.0f} to {max(r) / 1e9:.0f})"
            for r in rates
        ]
        size = f"{cases[0]['block_bytes'] / 1e6:.2f} MB"
        lines.append(f"| {cases[0]['case']}, {size} | {cells[0]} | {cells[1]} |")
    return lines


def make_disaggregation(records: Records) -> list[str]:
    """Both layouts at each rate, and which limits each holds."""
    record, _ = records.load("gpt-oss-20b_2xh200_disaggregation")
    lines = [
        "| requests/s | layout | TTFT p50 | p99 | TPOT p50 | p99 | tok/s"
        f" | holds {record['ttft_ms']:,.0f} ms and a TPOT of |",
        "|---|---|---|---|---|---|---|---|",
    ]
    points = [(p, found["layout"]) for found in record["layouts"] for p in found["points"]]
    for point, layout in sorted(points, key=lambda pair: pair[0]["rate_per_s"]):
        held = ", ".join(f"{limit:g}" for limit in point["holds_at_tpot_ms"])
        lines.append(
            f"| {point['rate_per_s']:g} | {layout} | {point['ttft_p50_ms']:,.0f} ms"
            f" | {point['ttft_p99_ms']:,.0f} | {point['tpot_p50_ms']:.1f} ms"
            f" | {point['tpot_p99_ms']:.1f} | {point['output_tokens_per_s']:,.0f}"
            f" | {held + ' ms' if held else 'none'} |"
        )
    return lines


def make_roofline(records: Records) -> list[str]:
    """The steps of the roofline bench, each with its picture."""
    record, link = records.load("roofline_1xh200_one-card")
    rates = _ceilings(record)
    lines = [
        f"{record['hardware']['name']}: copy {rates['memory'] / 1e12:.2f} TB/s, products"
        f" {rates['bf16'] / 1e12:.0f} TFLOP/s in bf16 and {rates['fp8'] / 1e12:,.0f} in FP8,"
        f" {link}.",
        "",
        "| step | ms | floor ms | of the roofline | furthest from it |",
        "|---|---|---|---|---|",
    ]
    for step in record["steps"]:
        gaps: dict[str, float] = {}
        for row in step["rows"]:
            gap = row["measured_s"] - _floor_s(row, rates) if row["measured_s"] else 0.0
            gaps[row["op"]] = gaps.get(row["op"], 0.0) + gap
        worst = sorted(gaps, key=lambda op: -gaps[op])[:3]
        listed = ", ".join(f"{op} {gaps[op] * 1e3:.2f} ms" for op in worst)
        floor_s = sum(_floor_s(row, rates) for row in step["rows"])
        lines.append(
            f"| {_step_label(step['step'])} | {step['total_s'] * 1e3:.2f}"
            f" | {floor_s * 1e3:.2f} | {floor_s / step['total_s']:.0%} | {listed} |"
        )
    lines.append("")
    lines += [f"![{_step_label(name)}](images/{picture})" for name, picture in PICTURES.items()]
    return lines


def _ceilings(record: Record) -> dict[str, float]:
    """The highest rates that a step of the record was held against: a run may have measured them
    before each step, and a copy is slower where memory was taken and given back."""
    rates = {"memory": 0.0, "bf16": 0.0, "fp8": 0.0}
    for step in record["steps"]:
        for row in step["rows"]:
            kind = "memory" if row["is_memory_bound"] else _number_format(row)
            work = row["cost"]["bytes" if row["is_memory_bound"] else "flops"] * row["num_calls"]
            rates[kind] = max(rates[kind], work / row["floor_s"])
    return rates


def _number_format(row: Record) -> str:
    return "fp8" if row["op"].startswith("fp8_") else "bf16"


def _floor_s(row: Record, rates: dict[str, float]) -> float:
    memory_s = row["cost"]["bytes"] / rates["memory"]
    return float(
        max(memory_s, row["cost"]["flops"] / rates[_number_format(row)]) * row["num_calls"]
    )


def _step_label(step: str) -> str:
    name, num_rows, new_tokens, context, *rest = step.split(":")
    what = "1 token" if new_tokens == "1" else f"{new_tokens} tokens"
    label = f"{name}, {num_rows} x {what} at {context}"
    if "fp8" in rest:
        label += ", FP8 KV"
    if "deterministic" in rest:
        label += ", deterministic"
    return label + "".join(f", {word} layers" for word in rest if word.isdigit())


def draw_pictures(records: Records) -> None:
    """Takes matplotlib; the tables do not."""
    from pelton.bench.roofline import OpRow, draw_rows
    from pelton.engine.step_timing import StepTimes
    from pelton.perf.cost import OpCost

    record, _ = records.load("roofline_1xh200_one-card")
    rates = _ceilings(record)
    for step in record["steps"]:
        if step["step"] in PICTURES:
            rows = [
                OpRow(**{**row, "cost": OpCost(**row["cost"]), "floor_s": _floor_s(row, rates)})
                for row in step["rows"]
            ]
            times = StepTimes([], step["total_s"])
            title = f"{_step_label(step['step'])}: {step['total_s'] * 1e3:.2f} ms"
            draw_rows(rows, times, title, IMAGES / PICTURES[step["step"]])


TABLES: dict[str, Callable[[Records], list[str]]] = {
    "results": make_results,
    "peers": make_peers,
    "gpu": make_gpu,
    "kernels": make_kernels,
    "drafts": make_drafts,
    "arrivals": make_arrivals,
    "experts": make_experts,
    "roofline": make_roofline,
    "gpu-transfers": make_gpu_transfers,
    "disaggregation": make_disaggregation,
}


def fill(page: Path) -> str:
    text = page.read_text()
    for name, make in TABLES.items():
        begin, end = f"<!-- {name}:begin -->\n", f"<!-- {name}:end -->"
        if begin in text:
            head, _, rest = text.partition(begin)
            _, _, tail = rest.partition(end)
            text = head + begin + "\n".join(make(Records(page))) + "\n" + end + tail
    return text


def main() -> None:
    for page in PAGES:
        text = fill(page)
        if "--check" not in sys.argv:
            page.write_text(text)
        elif page.read_text() != text:
            sys.exit(f"{page.relative_to(ROOT)} is stale: run `make reference`")
    if "--pictures" in sys.argv:
        draw_pictures(Records(PAGES[1]))


if __name__ == "__main__":
    main()
