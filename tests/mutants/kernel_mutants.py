"""Planted faults of the C++ kernels; see run.py. Each is compiled; where there is no compiler, none can be run."""

from __future__ import annotations

from mutant import Mutant

CSRC = "engine/kernels/csrc"
ATTENTION = ("tests/engine/kernels/test_cpp_attention.py",)
LINEAR = ("tests/engine/kernels/test_cpp_linear.py",)
CODED = ("tests/engine/kernels/test_cpp_coded.py",)
SCREEN = ("tests/engine/kernels/test_cpp_screen.py",)
ROTARY = ("tests/engine/kernels/test_cpp_rotary.py",)

KERNELS: tuple[Mutant, ...] = (
    Mutant(
        "kernel-sees-one-key-beyond",
        f"{CSRC}/attention.cpp",
        "std::clamp<int64_t>(position + 1 - key, 0, kTile)",
        "std::clamp<int64_t>(position + 2 - key, 0, kTile)",
        ATTENTION,
    ),
    Mutant(
        "kernel-window-one-key-too-wide",
        f"{CSRC}/attention.cpp",
        "std::max<int64_t>(0, position - in_.window + 1)",
        "std::max<int64_t>(0, position - in_.window)",
        ATTENTION,
    ),
    Mutant(
        "kernel-multiplies-values-beyond-the-context",
        f"{CSRC}/attention.cpp",
        "    if (num_left < kChunk) {\n",
        "    if (num_left < 0) {\n",
        ATTENTION,
    ),
    Mutant(
        "kernel-merges-records-backwards",
        f"{CSRC}/attention.cpp",
        "merge(total, record_of(rows, partition) + row",
        "merge(total, record_of(rows, unit.end_partition + unit.first_partition - partition) + row",
        ATTENTION,
    ),
    Mutant(
        "kernel-keeps-denormals",
        f"{CSRC}/attention.cpp",
        "_mm_setcsr(before_ | kResultsAndOperands);",
        "_mm_setcsr(before_);",
        ATTENTION,
    ),
    Mutant(
        "kernel-product-reads-beyond-an-odd-row",
        f"{CSRC}/linear_tile.h",
        "{x[row * stride + depth - 1], T{}}",
        "{x[row * stride + depth - 1], x[row * stride + depth]}",
        LINEAR,
    ),
    Mutant(
        "kernel-forgets-exceptions",
        f"{CSRC}/linear_coded.h",
        "copy[exception->place % kPairElements].bits = exception->bits;",
        "static_cast<void>(copy);",
        CODED,
    ),
    Mutant(
        "kernel-takes-the-other-steps-codes",
        f"{CSRC}/linear_coded.h",
        "{looked_up(table, low_codes(codes)), looked_up(table, high_codes(codes))}",
        "{looked_up(table, high_codes(codes)), looked_up(table, low_codes(codes))}",
        CODED,
    ),
    Mutant(
        "kernel-multiplies-a-pair-beyond-the-depth",
        f"{CSRC}/linear_coded.h",
        "const int64_t num_whole = depth / 4,",
        "const int64_t num_whole = (depth + 3) / 4,",
        CODED,
    ),
    Mutant(
        "kernel-trusts-what-a-head-says",
        f"{CSRC}/linear_coded.h",
        "std::clamp<int64_t>(head_->num_exceptions, 0, weight.num_exceptions - first)",
        "head_->num_exceptions",
        CODED,
    ),
    Mutant(
        "kernel-codes-the-rarest",
        f"{CSRC}/linear_coded_ops.cpp",
        "return counts[a] > counts[b];",
        "return counts[a] < counts[b];",
        CODED,
    ),
    Mutant(
        "screen-forgets-what-coding-lost",
        f"{CSRC}/screen.cpp",
        "fma(fill(r.along), error, fma(fill(r.apart), norm, fill(r.least)))",
        "fma(fill(r.apart), norm, fill(r.least))",
        SCREEN,
    ),
    Mutant(
        "screen-stops-at-the-first-tile",
        f"{CSRC}/screen.cpp",
        "for (; !candidates.empty() && candidates.front().high >= peak.value; candidates.pop_back()) {",
        "for (; !candidates.empty() && peak.id < 0; candidates.pop_back()) {",
        SCREEN,
    ),
    Mutant(
        "screen-believes-a-row-that-gave-up",
        f"{CSRC}/screen.cpp",
        "      if (!bounds[tile].usable) return false;\n",
        "",
        SCREEN,
    ),
    Mutant(
        "screen-takes-the-likeliest-for-the-noisiest",
        f"{CSRC}/screen.cpp",
        "    a_.choices.token_ids[row] = best.id;\n",
        "    a_.choices.token_ids[row] = peak.id;\n",
        SCREEN,
    ),
    Mutant(
        "kernel-rotates-the-wrong-way",
        f"{CSRC}/rotary.cpp",
        "sub(mul(a, cosine), mul(b, sine))",
        "add(mul(a, cosine), mul(b, sine))",
        ROTARY,
    ),
)
