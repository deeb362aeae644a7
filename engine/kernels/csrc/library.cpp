// The library's name and what belongs to no kernel; each *_ops.cpp adds its operations.
#include <torch/library.h>

#include "levels.h"
#include "threads.h"

namespace {

// The best level that this CPU has; 0 if none.
int64_t best_level() {
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return 0;
  const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                      __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!avx512) return static_cast<int64_t>(tandem::Level::avx2);
  const bool bf16 = __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni");
  return static_cast<int64_t>(bf16 ? tandem::Level::avx512bf16 : tandem::Level::avx512);
}

void set_threads(int64_t num_threads, at::IntArrayRef cores) {
  TORCH_CHECK(num_threads >= 1, "num_threads must be at least 1");
  TORCH_CHECK(cores.empty() || static_cast<int64_t>(cores.size()) == num_threads, "one core per thread, or none");
  tandem::set_threads(static_cast<int>(num_threads), std::vector<int>(cores.begin(), cores.end()));
}

int64_t num_threads() { return tandem::num_threads(); }

}  // namespace

TORCH_LIBRARY(tandem, m) {
  m.def("best_level() -> int", &best_level);
  m.def("set_threads(int num_threads, int[] cores) -> ()", &set_threads);
  m.def("num_threads() -> int", &num_threads);
}
